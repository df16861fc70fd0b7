"""What a run's log says of the calls of its agents, held against what the agents noted, and against
an engine that nobody has disturbed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from rlstreams.check.trial.sample import loaded
from rlstreams.debug.rerun.rebuilt import steps_again
from rlstreams.schemas.calls import AGENT, ENDED, JUDGED, REWARD
from rlstreams.schemas.events import CallCommitted, OutcomeReported, Segment, Trajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.streams.tokens import Ints
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Engine, SampleRequest, Sampling
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.rollout.sampling import sampling_of

AT_ONCE = 64  # requests of the engine that checks
Floats: TypeAlias = npt.NDArray[np.float32]


class Note(NamedTuple):
    """A line of `agent_program`."""

    what: str
    session: str
    turn: int
    at_ms: int
    call: str
    text: str


def notes_of(file: Path) -> list[Note]:
    """All whole lines, in the order in which they were written."""
    text = file.read_text(encoding="utf-8")
    return [Note(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A call as it can be compared between two runs."""

    prompt: tuple[int, ...]
    weights: frozenset[str]  # hashes of those that sampled it
    answer: tuple[int, ...]
    logprobs: Floats  # of the answer, nats


def spoken_of(session: Session, name: str) -> Spoken:
    """The call, with its whole prompt."""
    call, ids = session.nodes[name].call, session.tokens_of(name)
    prompt, answer = ids[: call.prompt_tokens], ids[call.prompt_tokens :]
    return Spoken(
        prompt=tuple(prompt.tolist()),
        weights=frozenset(one.weight_hash for one in call.segments if len(one.token_ids)),
        answer=tuple(answer.tolist()),
        logprobs=np.concatenate([_logprobs(one) for one in call.segments]),
    )


def _logprobs(segment: Segment) -> Floats:
    assert segment.behavior_logprobs is not None
    return segment.behavior_logprobs.numpy()


def accounted(log: RunLog, sessions: Sequence[Session], notes: Sequence[Note]) -> dict[str, Any]:
    """Counts of what was promised and broken: all under `broken` should be 0."""
    copies = Counter(one.event.call_id for one in log.read(CallCommitted, with_copies=True))
    said = Counter(one.event.outcome_id for one in log.read(OutcomeReported, with_copies=True))
    nodes = {name: (one, node.call) for one in sessions for name, node in one.nodes.items()}
    heard = [note for note in notes if note.what == "heard"]
    texts = {(note.call, note.text) for note in heard}
    samples = {f"{t.group_id}/{t.sample}": t for t in (r.event for r in log.read(Trajectory))}
    asked, again = _asked(sessions, notes)
    return {
        "sessions": dict(Counter(one.closed.kind if one.closed else "open" for one in sessions)),
        "starts": sum(one.num_starts for one in sessions),
        "calls": len(nodes),
        "heard": len(heard),
        "answered_from_the_log": sum(len(one.replays) for one in sessions),
        "asked": asked,
        "asked_in_a_start_that_was_lost": sum(again.values()),
        "void_records": sum(one.num_void for one in sessions),
        "broken": {
            "heard and not in the log": len({note.call for note in heard} - nodes.keys()),
            "call recorded twice": sum(num - 1 for num in copies.values()),
            "call heard with two texts": len(texts) - len({call for call, _ in texts}),
            "heard with other words than recorded": sum(
                _answer(nodes[note.call][1]) != note.text for note in heard if note.call in nodes
            ),
            "two turns sampled again by one lost start": sum(num > 1 for num in again.values()),
            "call that continues none, behind the first": sum(
                node.parent is None for one in sessions for node in list(one.nodes.values())[1:]
            ),
            "client from outside that worked, and did not end": sum(
                one.closed is None or one.closed.kind != ENDED
                for one in sessions
                if one.opened is not None and one.opened.client_group
                if any(note.session == one.session_id for note in heard)
            ),
            "outcome recorded twice": sum(num - 1 for num in said.values()),
            "session judged more or less than once": len(_misjudged(sessions, samples)),
        },
    }


def _answer(call: CallCommitted) -> str:
    from rlstreams.streams.sessions.chain import unpacked

    return str(json.loads(unpacked(call.response))["content"])


def _misjudged(sessions: Sequence[Session], samples: Mapping[str, Trajectory]) -> list[str]:
    """Sessions whose outcome is not the one that their sample was rewarded by."""
    found = []
    for one in sessions:
        rewards = [o.reward for o in one.standing if (o.grader, o.kind) == (AGENT, REWARD)]
        sample, kind = samples.get(one.session_id), one.closed.kind if one.closed else ""
        is_right = sample is None or [sample.reward] == rewards
        if not is_right or (kind in JUDGED) != (sample is not None):
            found.append(one.session_id)
    return found


def _asked(
    sessions: Sequence[Session], notes: Sequence[Note]
) -> tuple[int, Counter[tuple[str, int]]]:
    """Requests that a gateway may have taken; and of those that were not answered, and whose answer
    that start did not record either, the turns by session and start. No call is sampled that
    nobody asks for, so these bound what was sampled in vain."""
    begun = {
        one.session_id: [(s.at_ms, n) for n, s in sorted(one.starts.items())] for one in sessions
    }
    recorded = {
        (one.session_id, node.call.start, node.depth)
        for one in sessions
        for node in one.nodes.values()
    }
    taken, lost = 0, set[tuple[str, int, int]]()
    open_asks: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for note in notes:
        waiting = open_asks[note.session, note.turn]
        if note.what == "asks":
            taken += 1
            waiting.append(note.at_ms)
        else:
            taken -= note.what == "unsent"
            waiting.pop()
    for (session, turn), times in open_asks.items():
        for at_ms in times:
            starts = [number for ms, number in begun.get(session, ()) if ms <= at_ms]
            if starts and (session, starts[-1], turn) not in recorded:
                lost.add((session, starts[-1], turn))
    return taken, Counter((session, start) for session, start, _ in lost)


def resampled(
    bus: Bus, config: RunConfig, sessions: Sequence[Session], folder: Path
) -> dict[str, Any]:
    """Sample each call again, alone with its identity and with the weights that it names, which the
    steps make when they are done again; name those whose tokens differ.

    Raises: as `steps_again`.
    """
    unequal = [
        step.fact.step for step, found in steps_again(bus, config, keep_weights=folder) if found
    ]
    asked: defaultdict[int, list[_Part]] = defaultdict(list)
    for part in _parts(sessions):
        asked[part.segment.policy_version].append(part)
    files = {version: next(folder.glob(f"v{version:08d}-*")) for version in sorted(asked)}
    differ, nats = asyncio.run(_compared(config, asked, files))
    parts = [part for of_version in asked.values() for part in of_version]
    return {
        "steps_done_again_that_differ": unequal,
        "versions": len(asked),
        "calls": len(parts),
        "tokens": sum(len(part.segment.token_ids) for part in parts),
        "tokens_behind_other_weights": sum(
            sampled_tokens(call) for one in sessions for call in one.calls
        )
        - sum(len(part.segment.token_ids) for part in parts),
        "differ": differ,
        "largest_logprob_difference": nats,
    }


class _Part(NamedTuple):
    """What one version sampled of a call, and its prompt."""

    name: str
    sample_id: str
    group_id: str
    seed: int
    prompt: Ints
    segment: Segment


def _parts(sessions: Sequence[Session]) -> Iterator[_Part]:
    """Of each call what its first weights sampled. Where new ones come on the way, the engine goes
    on with keys and values of the old ones, which nobody else has: what follows is no promise."""
    for session in sessions:
        assert session.opened is not None
        for name, node in session.nodes.items():
            call, ids = node.call, session.tokens_of(name)
            num, sample_id = call.prompt_tokens, f"{session.session_id}/{name}/{call.attempt}"
            first = next((one for one in call.segments if len(one.token_ids)), None)
            if first is not None:
                seed = session.opened.seed
                yield _Part(name, sample_id, call.group_id, seed, ids[:num], first)


async def _compared(
    config: RunConfig, asked: Mapping[int, Sequence[_Part]], files: Mapping[int, Path]
) -> tuple[list[str], float]:
    """Names of calls that an undisturbed engine answers otherwise; and how much their log-probs
    differ at most, nats."""
    (_, engine), found, nats = loaded(config), list[str](), 0.0
    await engine.start()
    sampling = sampling_of(config.rollout)
    for version, file in files.items():
        held = HeldWeights(dict(sorted(load_file(file).items())), config.model.path, version)
        await engine.pull(held.published, held)
        room = asyncio.Semaphore(AT_ONCE)
        work = (_again(engine, sampling, part, room) for part in asked[version])
        for part, (ids, logprobs) in zip(asked[version], await asyncio.gather(*work), strict=True):
            if ids == part.segment.token_ids.numpy().tolist():
                nats = max(nats, largest_difference(logprobs, _logprobs(part.segment)))
            else:
                found.append(part.name)
    await engine.close()
    return found, nats


def largest_difference(some: Floats, others: Floats) -> float:
    """Of two of the same length; 0 if they are empty."""
    return float(np.abs(some - others).max(initial=0.0))


async def _again(
    engine: Engine, sampling: Sampling, part: _Part, room: asyncio.Semaphore
) -> tuple[list[int], Floats]:
    """Tokens and log-probs, as many as the segment has; it may have been cut by new weights."""
    num = len(part.segment.token_ids)
    request = SampleRequest(
        sample_id=part.sample_id,
        group_id=part.group_id,
        token_ids=part.prompt,
        prompt_tokens=len(part.prompt),
        sampling=sampling,
        seed=part.seed,
    )
    async with room:
        segments = await whole_turn(engine, request)
    assert {one.weight_hash for one in segments} == {part.segment.weight_hash}
    ids = [token for one in segments for token in one.token_ids.tolist()]
    return ids[:num], np.concatenate([one.logprobs for one in segments])[:num]


def compared(one: Sequence[Session], other: Sequence[Session]) -> dict[str, Any]:
    """Calls that both runs have, by identity: those of the same prompt, sampled by the same weights
    alone, should have the same tokens."""
    first, second = _all_spoken(one), _all_spoken(other)
    both = first.keys() & second.keys()
    alike = [
        name
        for name in sorted(both)
        if (first[name].prompt, first[name].weights) == (second[name].prompt, second[name].weights)
        and len(first[name].weights) == 1
    ]
    differ = [name for name in alike if first[name].answer != second[name].answer]
    same = set(alike) - set(differ)
    return {
        "calls_of_both": len(both),
        "of_the_same_prompt_and_weights": len(alike),
        "differ": differ,
        "largest_logprob_difference": max(
            (largest_difference(first[n].logprobs, second[n].logprobs) for n in same), default=0.0
        ),
    }


def _all_spoken(sessions: Sequence[Session]) -> dict[str, Spoken]:
    return {name: spoken_of(one, name) for one in sessions for name in one.nodes}
