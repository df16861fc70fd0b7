"""Logs that are broken at random, in up to six ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlstreams.schemas.events import (
    AbsentSample,
    ClosedGroups,
    MaskedSegment,
    PartitionPosition,
    StepCompleted,
)
from rlstreams.streams.log.record import ID_HEADER, Partition
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    policy_loaded,
    policy_published,
    redo_drifted,
    trainer_started,
)
from tests.unit.streams.audit_log import CONFIG, SIZE, Log

OTHER = "b2" * 32
FATES = ("trained", "trained", "trained", "dropped", "scored", "rolled", "issued")
LARGE = ("prompts", "trajectories", "scored-trajectories")


def made_log(chance: random.Random) -> Log:
    """A healthy run: groups at every stage, a step or a drop for each that is closed."""
    log = Log()
    log.add("steps", trainer_started(config=CONFIG))
    log.publish(0)
    version, closed = 0, 0
    for number in range(chance.randint(0, 6)):
        group, fate = str(number), chance.choice(FATES)
        if fate in ("trained", "dropped") and closed == number:
            refs = log.score(group, version)
            closed += 1
            if fate == "dropped":
                event = groups_dropped(
                    groups=(dropped_group(group),), closed=ClosedGroups(watermark=closed)
                )
                log.add("steps", event)
            else:
                version += 1
                log.step(version, refs, closed)
                log.publish(version)
        elif fate == "scored":
            log.score(group, version)
        elif fate == "rolled":
            log.roll_out(group, version)
        else:
            log.issue(group)
    if chance.random() < 0.5:
        log.logprob_done.update(log.roll_out("e0-7", purpose="evaluate"))
    return log


def hide(log: Log, chance: random.Random) -> None:
    topic = chance.choice(LARGE)
    if log.topics[topic]:
        log.hidden.add((topic, chance.randrange(len(log.topics[topic]))))


def damage(log: Log, chance: random.Random) -> None:
    topic = chance.choice(LARGE)
    if log.topics[topic]:
        offset = chance.randrange(len(log.topics[topic]))
        sample = f"{chance.randint(0, 6)}/{chance.randint(0, SIZE)}/0".encode()
        headers = chance.choice([{}, {ID_HEADER: sample}])
        log.damaged[topic, offset] = chance.choice([b"", b"junk", b"\xc3\x01" + b"7" * 20]), headers


def repeat(log: Log, chance: random.Random) -> None:
    topic = chance.choice([*LARGE, "steps", "policy-pulls", "policy-versions"])
    if log.topics[topic]:
        log.add(topic, chance.choice(log.topics[topic]))


def forget(log: Log, chance: random.Random) -> None:
    """A group has committed past all, whatever it answered."""
    name, topic = chance.choice([("rollout_done", "prompts"), ("logprob_done", "trajectories")])
    getattr(log, name).update(range(len(log.topics[topic])))


def set_aside(log: Log, chance: random.Random) -> None:
    name = {"group_id": str(chance.randint(0, 6)), "sample": chance.randint(0, SIZE)}
    origin = {"origin_topic": chance.choice(LARGE), "origin_offset": chance.randint(0, 12)}
    name = chance.choice([name, {"group_id": "", "sample": -1}])
    log.add("dead-letters", dead_letter(origin_partition=0, **origin, **name))


def drop(log: Log, chance: random.Random) -> None:
    group = dropped_group(str(chance.randint(0, 7)))
    closed = ClosedGroups(watermark=chance.randint(0, 6))
    log.add("steps", groups_dropped(groups=(group,), closed=closed))


def take_over(log: Log, chance: random.Random) -> None:
    steps = log.topics["steps"]
    steps.insert(chance.randint(1, len(steps)), trainer_started(epoch=2, config=CONFIG))


def publish(log: Log, chance: random.Random) -> None:
    version, changes = chance.randint(0, 4), chance.choice([{}, {"weight_hash": OTHER}])
    if chance.random() < 0.5:
        log.add("policy-versions", policy_published(version, **changes))
    if chance.random() < 0.5:
        log.add("policy-pulls", policy_loaded(version, load_id=f"x{version}", **changes))


def drift(log: Log, chance: random.Random) -> None:
    step, version = chance.randint(1, 3), chance.randint(1, 5)
    steps = log.topics["steps"]
    steps.insert(chance.randint(1, len(steps)), redo_drifted(step=step, policy_version=version))


def change_record(log: Log, chance: random.Random) -> None:
    """Of a trajectory: who made it, under which weights."""
    if not log.topics["trajectories"]:
        return
    offset = chance.randrange(len(log.topics["trajectories"]))
    event: Any = log.topics["trajectories"][offset]
    first, policy = event.segments
    change = chance.choice(
        [
            {"policy_version": chance.randint(-1, 4)},
            {"weight_hash": OTHER},
            {"load_id": "nobody"},
        ]
    )
    changed = replace(event, segments=(first, replace(policy, **change)))
    log.topics["trajectories"][offset] = changed
    for at, scored in enumerate(log.topics["scored-trajectories"]):
        if getattr(scored, "trajectory", None) == event:
            log.topics["scored-trajectories"][at] = replace(scored, trajectory=changed)


def change_ledger(log: Log, chance: random.Random) -> None:
    steps = [event for event in log.topics["steps"] if isinstance(event, StepCompleted)]
    if not steps:
        return
    event = chance.choice(steps)
    refs = list(event.samples)
    ref = chance.choice(refs) if refs else None
    name = {"group_id": str(chance.randint(0, 6)), "sample": chance.randint(0, SIZE)}
    changes: list[dict[str, Any]] = [
        {"policy_version": chance.randint(0, 5)},
        {"weight_hash": OTHER},
        {"previous_hash": OTHER},
        {"step": chance.randint(0, 5)},
        {"epoch": 2},
        {"closed": ClosedGroups(watermark=chance.randint(0, 6), above=(chance.randint(0, 9),))},
        {"absent": (AbsentSample(**name, reason="dead"),)},
        {"masked": (MaskedSegment(**name, segment=chance.randint(0, 1), staleness=1),)},
        {
            "positions": (
                PartitionPosition(topic=LARGE[2], partition=0, offset=chance.randint(0, 9)),
            )
        },
    ]
    if ref is not None:
        odd = [
            {"offset": chance.randint(0, 12)},
            {"oldest_policy_version": chance.randint(-1, 3)},
            {"group_id": chance.choice(["07", "e0-7", "4", "0"])},
            {"sample": chance.choice([0, 1, 5, -1, 1 << 20])},
        ]
        changed = replace(ref, **chance.choice(odd))
        changes += [
            {"samples": tuple(r for r in refs if r is not ref)},
            {"samples": (*refs, ref)},
            {"samples": tuple(changed if r is ref else r for r in refs)},
        ] * 2
    at = log.topics["steps"].index(event)
    log.topics["steps"][at] = replace(event, **chance.choice(changes))


def expire(log: Log, chance: random.Random) -> None:
    topic = chance.choice(LARGE[1:])
    first = chance.randint(0, len(log.topics[topic]))
    log.expired = {**log.expired, Partition(topic, 0): first}
    log.hidden |= {(topic, offset) for offset in range(first)}


FAULTS: tuple[Callable[[Log, random.Random], None], ...] = (
    hide, damage, repeat, forget, set_aside, drop, take_over, publish, drift, change_record,
    change_ledger, change_ledger, change_ledger, expire,
)  # fmt: skip


def broken_log(seed: int) -> Log:
    """Up to six faults."""
    chance = random.Random(seed)
    log = made_log(chance)
    for _ in range(chance.randint(0, 6)):
        chance.choice(FAULTS)(log, chance)
    return log
