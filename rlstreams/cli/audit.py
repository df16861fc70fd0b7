"""`rlstreams audit CONFIG...`: where every sample of a run is, from its topics alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import LOG, command, opened

if TYPE_CHECKING:
    from rlstreams.streams.audit.auditor import Auditor
    from rlstreams.streams.audit.report import Breach

FOLLOW_EVERY_S = 5.0
DONE = "done"  # the trainer's last heartbeat says so


@command("audit", LOG)
def run(args: argparse.Namespace) -> int:
    """account for every sample of a run, from its topics alone

    Reads committed offsets and topics, and reports for every issued sample whether it was
    trained, dropped, dead-lettered or evaluated, is in flight, or is lost. Exit status 1, with
    the ids, if the log violates a guarantee.

    --json    print the report as one JSON object
    --follow  audit a live run repeatedly; ends at the first breach or with the run

    rlstreams audit runs/demo
    rlstreams audit recordings/demo
    rlstreams audit run.toml --follow
    rlstreams audit run.toml --json --broker.bootstrap 127.0.0.1:9092
    """
    from rlstreams.streams.audit.auditor import SETTLE_S

    with _auditor(args) as auditor:
        if args.follow:
            return follow(auditor, SETTLE_S, FOLLOW_EVERY_S, as_json=args.json)
        report = auditor.round(SETTLE_S)
    print(report.to_json() if args.json else report.text())
    return 0 if report.ok else 1


@contextmanager
def _auditor(args: argparse.Namespace) -> Iterator[Auditor]:
    from rlstreams.streams.audit.auditor import Auditor
    from rlstreams.streams.audit.hanging import hanging
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.run.recorded_log import RecordedLog
    from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options

    with opened(args.config, args.overrides) as source:
        log, config = source.log, source.config

        def ask() -> Sequence[Breach]:
            if config is None:
                return ()
            return hanging(bootstrap_of(config), config.run.id, options=client_options(config))

        if isinstance(log, RecordedLog):
            if args.follow:
                raise ConfigError(
                    f"--follow is for a live run, and {log.name} is a recording: audit it once"
                )
            if missing := [*log.recording.manifest.selection.values(), *log.problems]:
                raise ConfigError(
                    f"{log.name} holds a part of its run ({missing[0]}): of what is not there "
                    "nobody can say whether it was lost"
                )
        with Auditor(log.bus, hanging=ask) as auditor:
            yield auditor


def follow(auditor: Auditor, settle_s: float, every_s: float, *, as_json: bool) -> int:
    """Round after round, a line each, until a breach (1), the end of the run or Ctrl-C (0)."""
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
