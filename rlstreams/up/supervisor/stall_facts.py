"""What a broker is asked about a run that makes no step: open transactions, groups' positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Committed, Partition
from rlstreams.streams.log.topics import PROMPTS, TRAJECTORIES
from rlstreams.streams.views.stalls import Held
from rlstreams.streams.views.workers import SILENT_S
from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options
from rlstreams.workers.config.run import RunConfig

_GROUPS = {"rollout": PROMPTS.name, "logprob": TRAJECTORIES.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFacts:
    """The answers, as far as they came."""

    committed: Mapping[str, Mapping[Partition, Committed]] = field(default_factory=dict)
    held: tuple[Held, ...] = ()


def ask_facts(bus: Bus, config: RunConfig) -> StallFacts:
    """Ask; the groups' positions only where no old transaction would have to be waited for.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
        DeadlineError: a transaction on a group's positions stays open.
    """
    held = held_by(bootstrap_of(config), config)
    if any(one.age_s > SILENT_S for one in held):
        return StallFacts(held=held)
    return StallFacts(committed=positions(bus), held=held)


def positions(bus: Bus) -> Mapping[str, Mapping[Partition, Committed]]:
    """Where the groups of rollout and logprob are."""
    return {group: bus.committed(group, topic) for group, topic in _GROUPS.items()}


def held_by(bootstrap: str, config: RunConfig) -> tuple[Held, ...]:
    """Open transactions in the run's topics, one for each transactional id.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    from rlstreams.streams.kafka.open_transactions import open_transactions

    run = config.run.id
    ages: dict[str, float] = {}
    partitions: dict[str, list[str]] = {}
    for found in open_transactions(bootstrap, run, client_options(config)):
        ages[found.transactional_id] = max(found.age_s, ages.get(found.transactional_id, 0.0))
        named = found.partition.removeprefix(f"{run}.")
        partitions.setdefault(found.transactional_id, []).append(named)
    return tuple(
        Held(
            worker=worker_of(full_id, run),
            transactional_id=full_id,
            partitions=tuple(partitions[full_id]),
            age_s=age_s,
        )
        for full_id, age_s in ages.items()
    )


def worker_of(transactional_id: str, run: str) -> str:
    """`{run}.{role}.{ordinal}` as `{role}-{ordinal}`; "" for an id that is no worker's."""
    role, dot, ordinal = transactional_id.removeprefix(f"{run}.").partition(".")
    is_ours = transactional_id.startswith(f"{run}.") and dot and ordinal.isdecimal()
    return f"{role}-{ordinal}" if is_ours else ""
