"""`rlstreams control pause|resume|drain RUN`: what all roles of a live run are to do."""

from __future__ import annotations

import argparse

from rlstreams.cli.arguments import RUN, command, configuration, group, opened_run

_ACTIONS = {
    "pause": ("paused", "finish what is begun, begin nothing new; weights are still pulled"),
    "resume": ("running", "go on after a pause; also before roles are started after a drain"),
    "drain": ("draining", "finish what is begun and end; `up` ends with it, --resume goes on"),
}

group(
    "control",
    "pause, resume or drain all roles of a live run, wherever they run",
    "Writes the desired state of a run to its topic control, which each role follows: rollout "
    "finishes its requests, logprob its window, the trainer its step.",
)


def run(args: argparse.Namespace) -> int:
    """Say it.

    Raises:
        ConfigError: no such run.
        BrokerError: its broker cannot be reached.
    """
    from rlstreams.streams.log.codec import outgoing
    from rlstreams.streams.log.topics import CONTROL
    from rlstreams.workers.loop.control import desired

    state, _ = _ACTIONS[args.action]
    config = configuration(args.config, args.overrides)
    with opened_run(config) as log, log.bus.producer("control") as producer:
        producer.commit([outgoing(CONTROL, desired(config.run.id, state, by="operator"))])
    print(f"run {config.run.id}: {state}")
    return 0


for _action, (_, _about) in _ACTIONS.items():
    _example = f"rlstreams control {_action} runs/demo"
    command(f"control {_action}", RUN, text=f"{_about}\n\n{_example}")(run)
