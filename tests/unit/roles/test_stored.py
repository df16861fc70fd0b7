"""Roles and the weight store: who comes late, or follows nothing else, pulls from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import PolicyLoaded, PolicyPublished, PolicyStored, ScoredTrajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import POLICY_PULLS, POLICY_VERSIONS, SCORED
from rlstreams.workers.logprob.worker import make_worker
from rlstreams.workers.loop.log import get
from rlstreams.workers.policy.view import PolicyView
from rlstreams.workers.weights.channel import WeightChannel, WeightManifest
from rlstreams.workers.weights.file import FileWeightChannel
from rlstreams.workers.weights.store.channel import StoreWeightChannel
from rlstreams.workers.weights.store.place import place_of
from rlstreams.workers.weights.store.writer import StoreWriter
from tests import factories
from tests.fake_engine import FakeScorer, fake_weights
from tests.stored_events import policy_stored
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_logprob import segment, send, trajectory

NEWEST, WANTED = 60, 17
DEADLINE_S = 60.0


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StoreWriter]:
    place = place_of(str(tmp_path / "store"))
    log = get("trainer", "trainer-0", "i")
    writer = StoreWriter(place, "demo", log, anchor_every=20, keep=0, deadline_s=DEADLINE_S)
    writer.open(1)
    yield writer
    writer.close()


def publish(stand: Stand, writer: StoreWriter, version: int) -> None:
    """Served by the stand's folder, and stored, each said in the log."""
    published = stand.publish(version)
    facts = published.policy_version, published.weight_hash, published.num_bytes, published.layout
    names = ("policy_version", "weight_hash", "num_bytes", "layout")
    writer.take(WeightManifest(**dict(zip(names, facts, strict=True))), fake_weights(version))
    writer.finish(DEADLINE_S)
    for one in writer.news():
        event = policy_stored(
            version, weight_hash=one.weight_hash, address=one.address, oldest_version=0, missing=()
        )
        stand.send(outgoing(POLICY_VERSIONS, event))


def score(stand: Stand, version: int, channel: WeightChannel) -> ScoredTrajectory:
    """A sample of this version, scored by a worker that starts now."""
    context = stand.context("logprob")
    role = make_worker(context, context.bus, FakeScorer(), channel)
    num = len(stand.read(SCORED.name, ScoredTrajectory))
    send(stand, trajectory(f"{num}", segment(version, 5)))
    tick_until(role, lambda: len(stand.read(SCORED.name, ScoredTrajectory)) > num)
    role.close()
    return stand.read(SCORED.name, ScoredTrajectory)[-1]


def test_a_fresh_scorer_scores_an_old_version_as_it_was(
    tmp_path: Path, writer: StoreWriter
) -> None:
    """Version 17 while the run is at 60 and four are served: under its own weights, bit for bit
    what a worker computed when it was the newest."""
    stand = Stand(tmp_path)
    for version in range(WANTED + 1):
        publish(stand, writer, version)
    then = score(stand, WANTED, FileWeightChannel())
    for version in range(WANTED + 1, NEWEST + 1):
        publish(stand, writer, version)
    now = score(stand, WANTED, FileWeightChannel())
    (one,), (other,) = then.scores, now.scores
    assert (one.anchor, one.policy_version) == (other.anchor, other.policy_version)
    assert (other.anchor, other.policy_version) == ("sampled", WANTED)
    assert one.proximal_logprobs.numpy().tobytes() == other.proximal_logprobs.numpy().tobytes()
    loads = stand.read(POLICY_PULLS.name, PolicyLoaded)
    assert [load.channel for load in loads if load.policy_version == WANTED] == ["file", "store"]


def test_a_worker_that_follows_the_store_waits_until_a_version_is_there(
    tmp_path: Path, writer: StoreWriter
) -> None:
    """What is announced and not stored is not asked for: no pull fails."""
    stand = Stand(tmp_path, weights__channel="store")
    publish(stand, writer, 1)
    stand.publish(2)
    context = stand.context("logprob")
    scorer = FakeScorer()
    role = make_worker(context, context.bus, scorer, StoreWeightChannel("demo"))
    tick_until(role, lambda: list(scorer.versions) == [1])
    publish(stand, writer, 2)
    tick_until(role, lambda: 2 in scorer.versions)
    loads = stand.read(POLICY_PULLS.name, PolicyLoaded)
    assert [(load.policy_version, load.channel) for load in loads] == [(1, "store"), (2, "store")]
    role.close()


def published(version: int, **changes: object) -> PolicyPublished:
    return factories.policy_published(version, weight_hash=f"{version:064x}", **changes)


def stored(version: int, **changes: object) -> PolicyStored:
    values = {"weight_hash": f"{version:064x}", "oldest_version": 0} | changes
    return policy_stored(version, **values)


def test_what_the_log_says_of_the_store() -> None:
    """Of the announced content alone, by nobody who was taken over, and no longer than kept."""
    view = PolicyView()
    for version in (1, 2, 3):
        view.apply(published(version))
    assert view.newest_in_store() is None
    view.apply(stored(1))
    view.apply(stored(2, weight_hash="0" * 64))
    assert view.kept == [1]
    assert view.newest_in_store() == view.get(1)
    view.apply(stored(3, oldest_version=2))
    assert view.kept == [3]
    assert [end.channel for end in view.get(1).endpoints] == ["file"]
    view.apply(replace(published(4), epoch=2))
    assert not view.apply(stored(2))
    assert view.kept == [3]
