"""A model in FSDP2 shards over two processes is served as if it were in one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.model.model import load_model, weights_of
from rlstreams.workers.weights.collective import CollectiveWeightChannel
from rlstreams.workers.weights.layout import layout_of, size_bytes, weight_hash
from rlstreams.workers.weights.sharded import ShardedWeights
from tests import factories
from tests.contract.test_collective_channel import SECRET
from tests.heavy.sharded_rank import MODEL, RANKS, WAIT_S, changed, disagree, main


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Connection]:
    """The pipe to rank 0 of two processes."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(RANKS)]
    processes = [
        spawn.Process(target=main, args=(rank, tmp_path, ends[rank][1])) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    yield ends[0][0]
    for process in processes:
        process.join(WAIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert [0, 0] == codes


def test_what_is_pulled_from_shards_equals_the_single_process_bit_for_bit(
    leader: Connection,
) -> None:
    """By a snapshot and without one; gathered in buckets smaller than the model."""
    single = load_model(MODEL, "float32")
    for version in range(2):
        expected = weights_of(changed(single))
        assert leader.poll(WAIT_S), f"version {version} is not published"
        published, hash_of_shards, num_tensors = leader.recv()
        received = _pull(leader, published)
        assert weight_hash(expected) == published.weight_hash == hash_of_shards
        assert list(expected) == list(received)
        assert len(expected) == num_tensors
        assert all(torch.equal(expected[name], received[name]) for name in expected)


def _pull(leader: Connection, published: PolicyPublished) -> dict[str, torch.Tensor]:
    channel = CollectiveWeightChannel("gloo", SECRET)
    version, address = published.policy_version, channel.address()
    leader.send(factories.pull_requested(version, channel="gloo", address=address))
    received = dict(channel.pull(published, WAIT_S))
    leader.send("done")
    channel.close()
    return received


def test_ranks_that_would_gather_otherwise_are_named(tmp_path: Path) -> None:
    """Other shapes: they would mix tensors up, or wait for each other."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=disagree, args=(rank, tmp_path)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert [0, 0] == codes


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "alone"), 1), rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_tensor_is_gathered_when_it_is_read() -> None:
    """In the order in which it is asked for; dtypes and shapes cost nothing."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    weights = ShardedWeights(model)
    asked: list[int] = []

    def share(number: int = 0) -> int:
        asked.append(number)
        return number

    weights._share = share  # type: ignore[method-assign]
    assert layout_of(dict(model.state_dict())) == layout_of(weights)
    assert 4 * (64 + 8) * 4 == size_bytes(weights)
    assert asked == []
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert list(range(8)) == asked


@pytest.mark.usefixtures("alone")
def test_tied_weights_travel_once_under_their_first_name() -> None:
    """As `weights_of` names them."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert ["a.bias", "a.weight", "b.bias"] == list(ShardedWeights(model))
    assert list(weights_of(model)) == list(ShardedWeights(model))
