"""`rlstreams monitor RUN`: the run's health as JSON over HTTP."""

from __future__ import annotations

import argparse
import sys

from rlstreams.cli.arguments import RUN, command, configuration, opened_run


@command("monitor", RUN)
def run(args: argparse.Namespace) -> int:
    """serve a run's health as JSON (extra `monitor`)

    Reads the small topics (steps, versions, pulls, dead letters, workers' reports; no prompts,
    no trajectories) and writes nothing. /health is 200, or 503 with what is wrong. Until
    Ctrl-C.

    --host ADDRESS  to listen on [127.0.0.1]
    --port PORT        to listen on; 0: a free one [9401]

    rlstreams monitor runs/demo
    rlstreams monitor run.toml --host 0.0.0.0 --port 9401 --deadlines.stall_s=600
    """
    from rlstreams.show.monitor.app import serve
    from rlstreams.show.monitor.health import SMALL
    from rlstreams.workers.bootstrap.parts import bootstrap_of

    config = configuration(args.config, args.overrides)

    def say(address: str) -> None:
        print(f"monitor of run {config.run.id}: {address}/health", file=sys.stderr, flush=True)

    with opened_run(config) as log:
        ends = {at: end for topic in SMALL for at, end in log.bus.ends(topic.name).items()}
        serve(
            config,
            bootstrap_of(config),
            ends,
            log.bus.schemas(),
            host=args.host,
            port=args.port,
            say=say,
        )
    return 0
