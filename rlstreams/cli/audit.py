"""`rlstreams audit CONFIG...`: where every sample of a run is, from its topics alone."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Commands, add_run, command, configuration, opened_run

if TYPE_CHECKING:
    from rlstreams.streams.audit.auditor import Auditor, Hanging
    from rlstreams.streams.audit.report import Breach
    from rlstreams.streams.kafka.open_transactions import OpenTransaction
    from rlstreams.workers.config.run import RunConfig

FOLLOW_EVERY_S = 5.0
DONE = "done"  # the trainer's last heartbeat says so
OVERDUE_S = 35.0  # the timeout of our own, and the time from one look of the broker to the next
WATCH_S = 10.0  # a live worker ends its transaction well within it, or adds to it


def add(subparsers: Commands) -> None:
    """Add the command."""
    parser = command(
        subparsers,
        "audit",
        run,
        """
        account for every sample of a run, from its topics alone

        Reads committed offsets and topics, and reports for every issued sample whether it was
        trained, dropped, dead-lettered or evaluated, is in flight, or is lost. Exit status 1, with
        the ids, if the log violates a guarantee.

        --json                 print the report as one JSON object
        --bootstrap HOST:PORT  the broker to read from, instead of the configured one or the run's
                               own
        --follow               audit a live run repeatedly; ends at the first breach or with the
                               run

        rlstreams audit runs/demo
        rlstreams audit recordings/demo
        rlstreams audit run.toml --follow
        rlstreams audit runs/demo --json --bootstrap 127.0.0.1:9092
        """,
    )
    add_run(parser, is_log=True)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if the log violates no guarantee, else 1."""
    from rlstreams.streams.audit.auditor import SETTLE_S

    with _auditor(args) as auditor:
        if args.follow:
            return follow(auditor, SETTLE_S, FOLLOW_EVERY_S, as_json=args.json)
        report = auditor.round(SETTLE_S)
    show(report.to_json() if args.json else report.text())
    return 0 if report.ok else 1


@contextmanager
def _auditor(args: argparse.Namespace) -> Iterator[Auditor]:
    from dataclasses import replace

    from rlstreams.streams.audit.auditor import Auditor
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.run.recorded_log import RecordedLog, is_recording

    if args.config and is_recording(args.config[0]):
        with RecordedLog(args.config[0]) as recorded:
            if args.follow:
                raise ConfigError(
                    f"--follow is for a live run, and {recorded.name} is a recording: audit it once"
                )
            if recorded.problems:
                raise ConfigError(
                    f"{recorded.name} holds a part of its run ({recorded.problems[0]}): of what is "
                    "not there nobody can say whether it was lost"
                )
            with Auditor(recorded.bus) as auditor:
                yield auditor
        return
    config = configuration(args.config, args.overrides)
    if args.bootstrap:
        config = replace(config, broker=replace(config.broker, bootstrap=args.bootstrap))
    with opened_run(config) as log, Auditor(log.bus, hanging=_hanging(config)) as auditor:
        yield auditor


def follow(auditor: Auditor, settle_s: float, every_s: float, *, as_json: bool) -> int:
    """Round after round, a line each, until a breach (1), the end of the run or Ctrl-C (0)."""
    number = 0
    try:
        while True:
            number += 1
            report = auditor.round(settle_s)
            line = f"round {number}: {'ok' if report.ok else 'BREACH'}, {report.line()}"
            show(report.to_json(indent=None) if as_json else line)
            if not report.ok:
                if not as_json:
                    show(report.text())
                return 1
            if report.trainer_state == DONE:
                return 0
            time.sleep(every_s)
    except KeyboardInterrupt:
        return 0


def show(text: str) -> None:
    """Print at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _hanging(config: RunConfig) -> Hanging:
    """Transactions that are open beyond their timeout: nothing behind one is read (KIP-664)."""

    def ask() -> Sequence[Breach]:
        from rlstreams.streams.kafka.open_transactions import open_transactions
        from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options

        bootstrap, options = bootstrap_of(config), client_options(config)
        found = open_transactions(
            bootstrap, config.run.id, options, older_than_s=OVERDUE_S, watch_s=WATCH_S
        )
        return [breach(one) for one in found]

    return ask


def breach(one: OpenTransaction) -> Breach:
    """What an open transaction breaks, and how an operator ends it."""
    from rlstreams.streams.audit.report import Breach, BreachKind
    from rlstreams.streams.log.text import utc_text

    detail = (
        f"nothing is read from offset {one.first_offset} on; producer id {one.producer_id}, epoch "
        f"{one.producer_epoch}, wrote last at {utc_text(one.written_at_ms)} UTC, {one.age_s:.0f} s "
        "ago. Unless its transactional id is in CompleteCommit, abort it (kafka-transactions.sh "
        "abort)"
    )
    return Breach(kind=BreachKind.HANGING, id=one.partition, detail=detail)
