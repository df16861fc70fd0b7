"""`rlstreams broker ACTION`: the embedded broker, a run's topics and their records."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstreams.cli.named import configuration, opened, print_json
from rlstreams.cli.options import CONFIG, COUNT, LOG, PORT, CommandGroup, argument, command, option
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.text import utc_text
from rlstreams.workers.config.nearest import meant

if TYPE_CHECKING:
    from rlstreams.schemas import SchemaTexts
    from rlstreams.streams.broker.embedded import EmbeddedBroker
    from rlstreams.streams.log.record import RawRecord

POLL_S = 0.5
READ_DEADLINE_S = 30.0  # longest wait for the next record below a known end
_BATCH = 500
_SHOWN = 60  # characters of a value in a line
_USUAL = "runs/broker"
_RUN = f"its folder or TOML file, or a folder for a broker of your own; default: {_USUAL}"

BROKER = CommandGroup("broker", "the embedded broker; a run's topics, and what lies in one")


@command(
    "start",
    "rlstreams broker start runs/demo",
    of=BROKER,
)
@argument("RUN", _RUN, required=False)
@option("--port", type=PORT, help="default: the folder's last port, or a free one")
def start(args: Namespace) -> int:
    """start it, unless it is running; it keeps running after this command"""
    state = _broker(args.run, args.port or 0).start()
    print(f"broker {state.pid} serves {state.bootstrap}; stop it with")
    print(f"  rlstreams broker stop {shlex.quote(args.run) if args.run else ''}".rstrip())
    return 0


@command(
    "stop",
    "rlstreams broker stop runs/demo",
    of=BROKER,
)
@argument("RUN", _RUN, required=False)
def stop(args: Namespace) -> int:
    """stop it; its data stays"""
    return _found(args.run, is_stopped=True)


@command(
    "status",
    "rlstreams broker status runs/demo",
    of=BROKER,
)
@argument("RUN", _RUN, required=False)
def status(args: Namespace) -> int:
    """print its address; exit status 1 if it is not running"""
    return _found(args.run, is_stopped=False)


def _broker(named: str | None, port: int = 0) -> EmbeddedBroker:
    """The broker of a run, with the run's own settings, or that of another folder.

    Raises ConfigError: a run that has a broker of its own, or a file that configures none.
    """
    from rlstreams.streams.broker.embedded import EmbeddedBroker
    from rlstreams.workers.bootstrap.parts import embedded_broker

    folder = Path(named or _USUAL)
    if not folder.is_file() and not (folder / "config.json").is_file():
        return EmbeddedBroker(folder, port)
    config = configuration([str(folder)], [])
    if config.broker.bootstrap:
        raise ConfigError(
            f"{folder}: broker.bootstrap names {config.broker.bootstrap}, which is not ours to "
            "start or stop"
        )
    broker = config.broker if not port else replace(config.broker, port=port)
    return embedded_broker(replace(config, broker=broker))


def _found(named: str | None, *, is_stopped: bool) -> int:
    """Print the address of a broker, and stop the broker if asked; 1: none is running."""
    broker = _broker(named)
    folder, state = broker.folder, broker.status()
    if state is None:
        print(f"no broker runs in {folder}")
        return 1
    if is_stopped:
        broker.stop()
        print(f"broker {state.pid} stopped; its data stays in {folder}")
    else:
        print(f"broker {state.pid} serves {state.bootstrap} from {folder}")
    return 0


@command(
    "topics",
    "rlstreams broker topics run.toml --broker.bootstrap=10.0.0.5:9092",
    "rlstreams broker topics run.toml --acls User:rl",
    of=BROKER,
    takes=CONFIG,
)
@option(
    "--acls",
    metavar="PRINCIPAL",
    help="instead, print the arguments of kafka-acls.sh, a call a line: the least rights of each "
    "role, whose principal is PRINCIPAL-ROLE, of PRINCIPAL-operator for commands that look and "
    "steer, and of PRINCIPAL-up",
    default="",
)
def topics(args: Namespace) -> int:
    """create missing topics, lengthen retention; refuse other partition counts"""
    if args.acls:
        from rlstreams.streams.log.rights import PRINCIPALS, acls

        run = configuration(*args.config).run.id
        for name in PRINCIPALS:
            for one in acls(run, name):
                print(f"--add --allow-principal {args.acls}-{name} {one.arguments()}")
        return 0
    from rlstreams.streams.kafka.admin import apply
    from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options, topic_plan

    config = configuration(*args.config)
    plan, options = topic_plan(config), client_options(config)
    created = apply(bootstrap_of(config), config.run.id, plan, options)
    print("\n".join(f"created {name}" for name in created) or "nothing was missing")
    return 0


@command(
    "tail",
    "rlstreams broker tail steps runs/demo --follow",
    "rlstreams broker tail dead-letters runs/demo --last 1 --json",
    of=BROKER,
    takes=LOG,
)
@argument("TOPIC", "name of the topic")
@option("--last", type=COUNT, help="how many", default=10, show_default=True)
@option("--follow", is_flag=True, help="go on with what comes, until Ctrl-C")
@option(
    "--json",
    is_flag=True,
    help="one JSON object a line, arrays in full; of a dead letter with its record",
)
def tail(args: Namespace) -> int:
    """the newest records of a topic, decoded: position, time, key, headers, event

    Of a live, finished or recorded run; changes nothing and joins no group. TOPIC without the
    run's prefix: steps, trajectories, dead-letters, ... A record that is no event of ours is
    shown with the reason.
    """
    from rlstreams.streams.log.read_to import read_to
    from rlstreams.streams.log.topics import TOPICS

    known = [topic.name for topic in TOPICS]
    if args.topic not in known:
        near = meant(args.topic, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"there is no topic {args.topic!r}{near}")
    with opened(*args.config) as source:
        bus = source.log.bus
        schemas, ends = bus.schemas(), dict(bus.ends(args.topic))
        back = 4 * args.last  # offsets: transactions have markers, large records several parts
        starts = {p: max(at, ends[p] - back) for p, at in bus.beginnings(args.topic).items()}
        with bus.reader(starts) as reader, suppress(KeyboardInterrupt):
            found = [raw for raws in read_to(reader, ends, READ_DEADLINE_S) for raw in raws]
            found.sort(key=lambda raw: (raw.timestamp_ms, raw.position))
            for raw in found[-args.last :] if args.last else ():
                _show(record_row(raw, schemas), as_json=args.json)
            while args.follow and source.log.is_growing:
                try:
                    for raw in reader.poll(_BATCH, POLL_S):
                        _show(record_row(raw, schemas), as_json=args.json)
                except BrokerError as err:  # `up` has stopped its broker
                    print(f"{source.log.name}: {err}", file=sys.stderr)
                    break
    return 0


def record_row(raw: RawRecord, schemas: SchemaTexts) -> dict[str, Any]:
    """Return a record with its envelope; one of no event of ours has `problem`, not `fields`."""
    from rlstreams.debug.letters.text import event_row

    return {
        **raw.position._asdict(),
        "at_ms": raw.timestamp_ms,
        "key": raw.key.decode("utf-8", "backslashreplace"),
        "headers": {k: v.decode("utf-8", "backslashreplace") for k, v in raw.headers.items()},
        **event_row(bytes(raw.value), schemas),
    }


def _show(row: dict[str, Any], *, as_json: bool) -> None:
    """Print a record as JSON, or as one terminal line with lists counted and long texts cut."""
    from rlstreams.words.screen import visible

    if as_json:
        print_json(row)
        return
    where = f"{row['topic']}[{row['partition']}]@{row['offset']}"
    fields = row.get("fields") or {"problem": row["problem"], "value": row["value"]}
    cells = [utc_text(row["at_ms"]), where, f"key={row['key']}", row["event"] or "no event:"]
    cells += [f"{name}={_short(value)}" for name, value in (fields | row["headers"]).items()]
    print(visible("  ".join(cells)), flush=True)


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"[{len(value)}]"
    if isinstance(value, dict) and "event" in value:
        return value["event"] or f"no event: {value['problem']}"
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
