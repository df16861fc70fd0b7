"""`rlstreams engine command|check`: how a model server is started, and what a running one lacks."""

from __future__ import annotations

import argparse

from rlstreams.cli.arguments import CONFIG, command, group, print_json
from rlstreams.streams.log.errors import ConfigError

group("engine", "start command for a model server; check one")


@command("engine command", CONFIG)
def run_command(args: argparse.Namespace) -> int:
    """print the complete start command

    KIND vllm|sglang          which server: vllm, sglang
    --format shell|docker|kubernetes  output format [shell]
    --image IMAGE             container image, for docker and kubernetes
    --server-version VERSION  version of the server, if it is not installed here

    rlstreams engine command vllm run.toml
    rlstreams engine command sglang run.toml --format kubernetes
    """
    from rlstreams.workers.bootstrap.model_server import Where, command_of, where_installed
    from rlstreams.workers.config.load import load
    from rlstreams.workers.engines.served.facts import TESTED, Kind

    config, kind = load(args.config, args.overrides), Kind(args.kind)
    if not config.model.path:
        raise ConfigError("model.path is empty; name a Hugging Face folder")
    if args.format == "shell" and not args.server_version:
        where = where_installed(config, kind)
    else:
        version = args.server_version or TESTED[kind][-1]
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


@command("engine check")
def run_check(args: argparse.Namespace) -> int:
    """check that a running server meets all requirements

    Exit status 1 if the server cannot be used.

    URL     http://HOST:PORT
    --json  one JSON object a line

    rlstreams engine check http://127.0.0.1:8000
    """
    import asyncio

    from rlstreams.workers.config.checks import check_urls
    from rlstreams.workers.engines.served.check import check_server, is_usable

    check_urls("URL", (args.url,))
    findings = asyncio.run(check_server(args.url))
    if args.json:
        print_json(*findings)
    for finding in () if args.json else findings:
        print(f"{finding.weight:<7} {finding.name:<19} {finding.found}")
        if finding.cure:
            print(f"{'':<28}fix: {finding.cure}")
    return 0 if is_usable(findings) else 1
