"""`rlstreams config ACTION`: a configuration's fields, its loss, its servers' commands."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import get_args

from rlstreams.cli.named import configuration, opened
from rlstreams.cli.options import CONFIG, LOG, CommandGroup, N, argument, command, one_of, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.engine import Server

GROUP = CommandGroup(
    "config", "what a configuration means: its fields, its loss and optimizer, a server's command"
)


@command(
    "show",
    "rlstreams config show",
    "rlstreams config show base.toml mine.toml --why trainer.optimizer.lr",
    "rlstreams config show run.toml --json --trainer.steps=3",
    of=GROUP,
    takes=CONFIG,
)
@option("--json", is_flag=True, help="as one JSON object, without origins")
@option("--why", metavar="FIELD", help="explain one field and where its value is set", default="")
def show(args: Namespace) -> int:
    """print every field, its value and its origin"""
    from rlstreams.workers.config.load import load_with_origins, resolved_json, tree_of
    from rlstreams.workers.config.shown import toml_lines, why

    loaded = load_with_origins(*args.config)
    if args.why:
        print("\n".join(why(args.why, tree_of(loaded.config), loaded.history)))
    elif args.json:
        print(resolved_json(loaded.config))
    else:
        print("\n".join(toml_lines(tree_of(loaded.config), loaded.origins)))
    return 0


@command(
    "schema",
    "rlstreams config schema > rlstreams.schema.json",
    of=GROUP,
)
def schema(args: Namespace) -> int:
    """print a JSON Schema for editors"""
    del args
    from rlstreams.workers.config.docs import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


@command(
    "fields",
    "rlstreams config fields > configuration.md",
    of=GROUP,
)
def fields(args: Namespace) -> int:
    """print every field as a page in Markdown"""
    del args
    from rlstreams.workers.config.docs import page

    print(page(), end="")
    return 0


@command(
    "loss",
    "rlstreams config loss run.toml --trainer.loss.kind gspo",
    "rlstreams config loss runs/demo --step 7",
    of=GROUP,
    takes=LOG,
)
@option("--step", type=N, help="the formula of step N, and what it made of its first group")
def loss(args: Namespace) -> int:
    """print the loss and optimizer that a configuration means; with --step, numbers of a step

    What a step would minimise, with every setting put in, and by which optimizer; functions of
    your own with their options and the hashes of their files. A configuration in which clipping,
    correction or a penalty would do nothing is refused with the reason.
    """
    from rlstreams.debug.loss.formula import formula, numbers
    from rlstreams.debug.rerun.foreign_code import source_lines
    from rlstreams.streams.run.recorded_log import is_recording
    from rlstreams.workers.config.load import from_json
    from rlstreams.workers.trainer.claim import read_ledger

    if args.step is None and not is_recording(args.config.names[0]):
        print("\n".join(formula(configuration(*args.config).trainer)))
        return 0
    with opened(*args.config) as found_run:
        if args.step is not None:
            lines = list(numbers(found_run.log.bus, args.step))
        else:
            trainer = from_json(json.dumps(found_run.log.configuration)).trainer
            claims = read_ledger(found_run.log.bus, "explain").claims
            claim = claims[max(claims)] if claims else None
            lines = list(formula(trainer, claim.code if claim else None))
            lines += source_lines(claim) if claim else []
    print("\n".join(lines))
    return 0


@command(
    "server",
    "rlstreams config server vllm run.toml",
    "rlstreams config server sglang run.toml --format kubernetes",
    of=GROUP,
    takes=CONFIG,
)
@argument("KIND", "which server", type=one_of(*get_args(Server)))
@option(
    "--format",
    type=one_of("shell", "docker", "kubernetes"),
    help="output format",
    default="shell",
    show_default=True,
)
@option("--image", metavar="IMAGE", help="container image, for docker and kubernetes", default="")
@option(
    "--server-version",
    metavar="VERSION",
    help="version of the server, if it is not installed here",
    default="",
)
def server(args: Namespace) -> int:
    """print the complete start command of a model server"""
    from rlstreams.workers.bootstrap.model_server import Where, command_of, where_installed
    from rlstreams.workers.config.load import load
    from rlstreams.workers.engines.served.facts import Kind

    config, kind = load(*args.config), Kind(args.kind)
    if not config.model.path:
        raise ConfigError("model.path is empty; name a Hugging Face folder")
    if args.format == "shell" and not args.server_version:
        where = where_installed(config, kind)
    else:
        version = args.server_version or kind.tested[-1]
        where = Where(python=config.engine.python or "python3", version=version)
    url = f"http://{config.engine.host}:{config.engine.port or 8000}"
    command = command_of(config, kind, where, url, {})
    print("# The server's environment needs the transfer plugin:  pip install ./infra/server")
    if args.format == "shell":
        print(command.shell())
        return 0
    image = args.image or f"{args.kind}:{where.version}"
    print(command.docker(image) if args.format == "docker" else command.kubernetes(image))
    return 0
