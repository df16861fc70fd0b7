"""The promises of `WeightServer` and `WeightChannel`, held against every channel on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlstreams.schemas.events import Endpoint, PolicyPublished
from rlstreams.workers.loop.log import get
from rlstreams.workers.weights.channel import (
    VersionGoneError,
    WeightChannel,
    WeightError,
    WeightServer,
)
from rlstreams.workers.weights.collective import CollectiveWeightChannel, CollectiveWeightServer
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link.safetensors_file import read
from rlstreams.workers.weights.store.channel import StoreWeightChannel, StoreWeightServer
from rlstreams.workers.weights.store.place import place_of
from rlstreams.workers.weights.store.writer import StoreWriter
from tests import factories
from tests.contract.engine_rigs import announced

DEADLINE_S = 60.0


def weights(policy_version: int) -> dict[str, torch.Tensor]:
    """Several dtypes and shapes, a scalar and an empty one among them; not in name order."""
    return {
        "model.z.weight": torch.arange(6.0).reshape(2, 3) + policy_version,
        "model.a.bias": torch.full((4,), policy_version, dtype=torch.bfloat16),
        "scale": torch.tensor(float(policy_version)),
        "buffer": torch.arange(5, dtype=torch.int64)[::2],
        "nothing": torch.empty(0, 3),
    }


@dataclass(frozen=True)
class Site:
    """Both ends of a channel."""

    server: WeightServer
    channel: WeightChannel
    writer: StoreWriter | None = None

    def publish(
        self, policy_version: int, live: dict[str, torch.Tensor] | None = None
    ) -> PolicyPublished:
        content = weights(policy_version) if live is None else live
        manifest = self.server.publish(policy_version, content)
        published = announced(self.server, manifest)
        if self.writer is None:
            return published
        self.writer.take(manifest, content)
        self.writer.finish(DEADLINE_S)
        (stored,) = self.writer.news()  # what `PolicyStored` says, and a worker's view adds
        end = Endpoint(channel="store", address=stored.address)
        return dataclasses.replace(published, endpoints=(end,))

    def pull(self, published: PolicyPublished) -> dict[str, torch.Tensor]:
        """The request stands in the log, and the version comes."""
        asked = factories.pull_requested(
            published.policy_version, channel=self.channel.name, address=self.channel.address()
        )
        self.server.serve(asked)
        return dict(self.channel.pull(published, DEADLINE_S))


@pytest.fixture(params=["file", "gloo", "store"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "file":
        yield Site(FileWeightServer(tmp_path, keep=9), FileWeightChannel())
        return
    log = get("trainer", "trainer-0", "i")
    if request.param == "store":
        place = place_of(str(tmp_path))
        writer = StoreWriter(place, "demo", log, anchor_every=2, keep=1, deadline_s=DEADLINE_S)
        writer.open(1)
        yield Site(StoreWeightServer(), StoreWeightChannel("demo"), writer)
        writer.close()
        return
    server = CollectiveWeightServer("gloo", host="127.0.0.1", secret="s", log=log)
    server.open(1)
    channel = CollectiveWeightChannel("gloo", "s")
    yield Site(server, channel)
    channel.close()
    server.close()


def publish(server: FileWeightServer, policy_version: int) -> PolicyPublished:
    return announced(server, server.publish(policy_version, weights(policy_version)))


def pull(channel: WeightChannel, published: PolicyPublished) -> dict[str, torch.Tensor]:
    return dict(channel.pull(published, DEADLINE_S))


def test_what_is_pulled_is_what_was_published(site: Site) -> None:
    """Names, dtypes, shapes and bits arrive, in name order, under the published hash; so does the
    next version."""
    for version in (3, 4):
        published = site.publish(version)
        assert site.channel.can_pull(published)
        received = site.pull(published)
        assert list(received) == sorted(weights(version))
        for name, tensor in weights(version).items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
        assert weight_hash(received) == published.weight_hash == weight_hash(weights(version))
        assert published.num_bytes == 24 + 8 + 4 + 24


def test_training_on_does_not_change_what_is_served(site: Site) -> None:
    live = weights(0)
    published = site.publish(0, live)
    live["scale"].add_(1)
    assert float(site.pull(published)["scale"]) == 0.0


def test_a_number_never_gets_a_second_content(site: Site) -> None:
    first = site.server.publish(1, weights(1))
    assert site.server.publish(1, weights(1)) == first
    with pytest.raises(WeightError, match=r"version 1 was published .*; it cannot become"):
        site.server.publish(1, weights(2))
    assert list(site.server.versions()) == [1]


def test_old_versions_are_retired(site: Site) -> None:
    announcements = [site.publish(version) for version in range(4)]
    site.server.retire(2)
    told = r"version 1 is no longer served.*\[2, 3\]"
    if site.writer is None:
        assert list(site.server.versions()) == [2, 3]
    else:  # its own retention removed it: one anchor of every two is kept
        told = r"version 1 is no longer served.*has: 2 to 3"
    with pytest.raises(VersionGoneError, match=told):
        site.pull(announcements[1])
    assert site.pull(announcements[3])


def test_a_version_without_an_endpoint_of_the_channel_cannot_be_pulled(site: Site) -> None:
    endpoints = (Endpoint(channel="other", address="localhost:1"),)
    elsewhere = dataclasses.replace(site.publish(0), endpoints=endpoints)
    assert not site.channel.can_pull(elsewhere)
    told = f"no endpoint of channel '{site.channel.name}', only of \\['other'\\]"
    with pytest.raises(WeightError, match=told):
        site.pull(elsewhere)


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    """Also by a server that starts anew on the folder."""
    first = FileWeightServer(tmp_path, keep=2)
    announcements = [publish(first, version) for version in range(4)]
    assert list(first.versions()) == [2, 3]
    assert not FileWeightChannel().can_pull(announcements[1])
    server = FileWeightServer(tmp_path, keep=2)
    assert announcements[3].weight_hash == server.publish(3, weights(3)).weight_hash
    with pytest.raises(WeightError, match="version 3 was published as"):
        server.publish(3, weights(2))
    assert list(server.versions()) == [2, 3]


def test_a_version_retired_during_a_pull_still_arrives(tmp_path: Path) -> None:
    """A receiver that has begun is not cut off by the next publications."""
    server, channel = FileWeightServer(tmp_path, keep=1), FileWeightChannel()
    arriving = channel.pull(publish(server, 0), DEADLINE_S)
    received = dict([next(arriving)])
    publish(server, 1)
    received.update(arriving)
    assert weight_hash(received) == weight_hash(weights(0))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_bytes_are_refused(tmp_path: Path, damage: str) -> None:
    """The iterator does not end well unless every byte is the published one."""
    server = FileWeightServer(tmp_path, keep=1)
    published = publish(server, 0)
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes({"flip": content, "cut": content[:-8], "empty": b""}[damage])
    with pytest.raises(WeightError, match=path.name):
        pull(FileWeightChannel(), published)


def test_a_layout_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    """Names and shapes are checked against the announcement, by name."""
    server = FileWeightServer(tmp_path, keep=1)
    published = publish(server, 0)
    wrong_shape = dataclasses.replace(published, layout=published.layout.replace("[2,3]", "[3,2]"))
    with pytest.raises(WeightError, match=r"model.z.weight should be float32 \[3, 2\]"):
        pull(FileWeightChannel(), wrong_shape)
    missing = dataclasses.replace(published, layout=published.layout.replace("scale", "scalf"))
    with pytest.raises(WeightError, match="scalf"):
        pull(FileWeightChannel(), missing)
    incomplete = dataclasses.replace(published, layout="[]")
    with pytest.raises(WeightError, match="buffer is unexpected"):
        pull(FileWeightChannel(), incomplete)


def test_a_pull_ends_at_its_deadline(tmp_path: Path) -> None:
    published = publish(FileWeightServer(tmp_path, keep=1), 0)
    with pytest.raises(WeightError, match="not read within 0 s"):
        list(FileWeightChannel().pull(published, 0.0))


def test_a_half_written_file_is_never_served(tmp_path: Path) -> None:
    """What a killed server left behind is removed by the next one, once that publishes."""
    torn = tmp_path / "v00000005-aaaaaaaaaaaa.1.tmp"
    torn.write_bytes(b"torn")
    server = FileWeightServer(tmp_path, keep=1)
    assert list(server.versions()) == []
    assert torn.exists(), "it may be of a trainer that lives"
    publish(server, 0)
    assert (list(server.versions()), torn.exists()) == ([0], False)


def test_a_server_removes_nothing_newer_than_its_own(tmp_path: Path) -> None:
    """A trainer that wakes up beside its successor leaves the successor's versions alone."""
    old = FileWeightServer(tmp_path, keep=1)
    publish(old, 1)
    successor = FileWeightServer(tmp_path, keep=4)
    for version in (1, 2, 3):
        publish(successor, version)
    old.publish(1, weights(1))
    old.retire(1)
    assert list(successor.versions()) == [1, 2, 3]


def test_a_server_that_slept_leaves_what_its_successor_is_writing(tmp_path: Path) -> None:
    """It published nothing before it slept: its first version comes behind the successor's."""
    slept, successor = FileWeightServer(tmp_path, 2), FileWeightServer(tmp_path, 2)
    slept.open(1)
    successor.open(2)
    successor.publish(0, weights(0))
    writing: list[Path] = []

    def rename(self: Path, target: Path) -> None:
        writing.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", rename)  # and there it stands
        successor.publish(1, weights(1))
    slept.publish(0, weights(0))
    assert [True] == [path.exists() for path in writing]
    third = FileWeightServer(tmp_path, 2)
    third.open(3)
    third.publish(0, weights(0))
    assert [False] == [path.exists() for path in writing]


def test_a_server_is_given_a_whole_file_of_a_stored_version(tmp_path: Path) -> None:
    """Servers know no store: the worker writes the file, and keeps two."""
    log = get("trainer", "trainer-0", "i")
    place = place_of(str(tmp_path / "store"))
    writer = StoreWriter(place, "demo", log, anchor_every=9, keep=0, deadline_s=DEADLINE_S)
    writer.open(1)
    site = Site(StoreWeightServer(), StoreWeightChannel("demo", tmp_path / "pulled"), writer)
    for version in range(4):
        published = site.publish(version)
        order = site.channel.order(published, DEADLINE_S)
        assert order["channel"] == "file"
        found = read(Path(str(order["address"])), published.weight_hash)
        assert weight_hash(found) == weight_hash(weights(version))
    assert len(list((tmp_path / "pulled").iterdir())) == 2
    writer.close()
