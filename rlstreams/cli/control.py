"""`rlstreams control pause|resume|drain RUN`: what all roles of a live run are to do."""

from __future__ import annotations

from argparse import Namespace

from rlstreams.cli.named import configuration, opened_run
from rlstreams.cli.options import RUN, Group, command

_ACTIONS = {
    "pause": ("paused", "finish what is begun, begin nothing new; weights are still pulled"),
    "resume": ("running", "go on after a pause; also before roles are started after a drain"),
    "drain": ("draining", "finish what is begun and end; `up` ends with it, --resume goes on"),
}

CONTROL = Group(
    "control",
    "pause, resume or drain all roles of a live run, wherever they run",
    "Writes the desired state of a run to its topic control, which each role follows: rollout "
    "finishes its requests, logprob its window, the trainer its step.",
)


def _command(action: str, about: str) -> None:
    @command(action, f"rlstreams control {action} runs/demo", of=CONTROL, takes=RUN, text=about)
    def run(args: Namespace) -> int:
        return control(action, args)


def control(action: str, args: Namespace) -> int:
    """Say it.

    Raises:
        ConfigError: no such run.
        BrokerError: its broker cannot be reached.
    """
    from rlstreams.streams.log.codec import outgoing
    from rlstreams.streams.log.topics import CONTROL as TOPIC
    from rlstreams.workers.loop.control import desired

    state, _ = _ACTIONS[action]
    config = configuration(*args.config)
    with opened_run(config) as log, log.bus.producer("control") as producer:
        producer.commit([outgoing(TOPIC, desired(config.run.id, state, by="operator"))])
    print(f"run {config.run.id}: {state}")
    return 0


for _action, (_, _about) in _ACTIONS.items():
    _command(_action, _about)
