"""`rlstreams audit CONFIG...`: the state of every sample of a run, from its topics alone."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlstreams.cli.named import ProgressLine, opened
from rlstreams.cli.options import LOG, command, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import utc_text

if TYPE_CHECKING:
    from rlstreams.streams.audit.auditor import Auditor
    from rlstreams.streams.audit.report import Breach
    from rlstreams.streams.kafka.open_transactions import OpenTransaction
    from rlstreams.workers.config.run import RunConfig

FOLLOW_EVERY_S = 5.0
DONE = "done"  # state in the trainer's last heartbeat
OVERDUE_S = 35.0  # our transactions' timeout, and the broker's interval between two checks of it
WATCH_S = 10.0  # a live worker ends its transaction well within it, or adds to it


@command(
    "audit",
    "rlstreams audit runs/demo",
    "rlstreams audit recordings/demo",
    "rlstreams audit run.toml --follow",
    "rlstreams audit run.toml --json --broker.bootstrap 127.0.0.1:9092",
    takes=LOG,
)
@option("--json", is_flag=True, help="print the report as one JSON object")
@option(
    "--follow",
    is_flag=True,
    help="audit a live run repeatedly; ends at the first breach or with the run",
)
def run(args: Namespace) -> int:
    """account for every sample of a run, from its topics alone

    Reads committed offsets and topics, and reports for every issued sample whether it was
    trained, dropped, dead-lettered or evaluated, is in flight, or is lost. Of a branch also
    whether its parent, if that can be read, left the weights with which it begins. Exit
    status 1, with the ids, if the log violates a guarantee.
    """
    from rlstreams.streams.audit.auditor import SETTLE_S

    with _auditor(args) as auditor:
        if args.follow:
            return follow(auditor, SETTLE_S, FOLLOW_EVERY_S, as_json=args.json)
        report = auditor.round(SETTLE_S)
    if report.begin is not None:
        from rlstreams.debug.branch.parent import with_parent

        report = with_parent(report, ProgressLine())
    print(report.to_json() if args.json else report.text())
    return 0 if report.ok else 1


@contextmanager
def _auditor(args: Namespace) -> Iterator[Auditor]:
    from rlstreams.streams.audit.auditor import Auditor
    from rlstreams.streams.run.recorded_log import RecordedLog

    with opened(*args.config) as source:
        log, config = source.log, source.config
        if isinstance(log, RecordedLog):
            if args.follow:
                raise ConfigError(
                    f"--follow is for a live run, and {log.name} is a recording: audit it once"
                )
            if log.problems:
                raise ConfigError(
                    f"{log.name} holds a part of its run ({log.problems[0]}): of what is not "
                    "there nobody can say whether it was lost"
                )
        with Auditor(log.bus, hanging=lambda: _hanging(config)) as auditor:
            yield auditor


def follow(auditor: Auditor, settle_s: float, every_s: float, *, as_json: bool) -> int:
    """Audit in rounds, a line each, until a breach (1), the end of the run or Ctrl-C (0)."""
    number = 0
    try:
        while True:
            number += 1
            report = auditor.round(settle_s)
            line = f"round {number}: {'ok' if report.ok else 'BREACH'}, {report.line()}"
            print(report.to_json(indent=None) if as_json else line, flush=True)
            if not report.ok:
                if not as_json:
                    print(report.text())
                return 1
            if report.trainer_state == DONE:
                return 0
            time.sleep(every_s)
    except KeyboardInterrupt:
        return 0


def _hanging(config: RunConfig | None) -> Sequence[Breach]:
    """Return transactions open beyond their timeout: no record behind one is read (KIP-664)."""
    if config is None:
        return ()
    from rlstreams.streams.kafka.open_transactions import open_transactions
    from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options

    bootstrap, options = bootstrap_of(config), client_options(config)
    found = open_transactions(
        bootstrap, config.run.id, options, older_than_s=OVERDUE_S, watch_s=WATCH_S
    )
    return [breach(one) for one in found]


def breach(one: OpenTransaction) -> Breach:
    """Return the breach of an open transaction; its detail says how an operator ends it."""
    from rlstreams.streams.audit.report import Breach, BreachKind

    detail = (
        f"nothing is read from offset {one.first_offset} on; producer id {one.producer_id}, epoch "
        f"{one.producer_epoch}, wrote last at {utc_text(one.written_at_ms)} UTC, {one.age_s:.0f} s "
        "ago. Unless its transactional id is in CompleteCommit, abort it (kafka-transactions.sh "
        "abort)"
    )
    return Breach(kind=BreachKind.HANGING, id=one.partition, detail=detail)
