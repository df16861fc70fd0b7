"""Weights as a log: the bits of each version come back, and bad files are named."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from rlstreams.workers.weights.channel import VersionGoneError, WeightError
from rlstreams.workers.weights.layout import manifest_of
from rlstreams.workers.weights.store import writer as module
from rlstreams.workers.weights.store.delta import pieces_of
from rlstreams.workers.weights.store.history import Chains, HeldVersion, WeightHistory
from rlstreams.workers.weights.store.place import place_of
from rlstreams.workers.weights.store.version_file import Stamp
from rlstreams.workers.weights.store.writer import Stored
from tests.readme_blocks import schemas_page
from tests.unit.weights.stores import (
    DEADLINE_S,
    get_back,
    hash_at,
    names,
    put,
    same,
    storing,
    weights,
)


def test_every_version_comes_back_bit_for_bit(filled: Path) -> None:
    """Long after it was made; under its hash, dtypes, shapes and names."""
    for version in (7, 0, 9, 4):
        assert same(get_back(filled, version), weights(version))
    assert len(names(filled)) == 9 + 3


def test_training_on_does_not_change_what_is_stored(tmp_path: Path) -> None:
    live = weights(0)
    manifest = manifest_of(0, live, None)
    with storing(tmp_path) as writer:
        writer.take(manifest, live)
        live["scale"].add_(1)
    assert float(get_back(tmp_path, 0)["scale"]) == 0.0


def test_an_independent_reader_gets_the_same_words(filled: Path) -> None:
    """By `schemas/README.md` alone: an anchor, and the deltas behind it, dense and sparse."""
    words_of = schemas_page()["words_of"]
    sizes = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
    (anchor,) = filled.glob("v00000004-*.anchor")
    found = {}
    for path in (anchor, *(next(filled.glob(f"v0000000{n}-*.delta")) for n in (5, 6, 7))):
        with path.open("rb") as file:
            found = words_of(file, found, sizes)
    for name, tensor in weights(7).items():
        assert found[name].tobytes() == b"".join(words.tobytes() for words in pieces_of(tensor))


def test_who_is_one_behind_reads_one_delta(filled: Path) -> None:
    """Also past an anchor; and its own tensors stay as they are."""
    held = HeldVersion(Stamp.of(7, hash_at(7)), dict(sorted(weights(7).items())))
    for path in filled.iterdir():
        if not path.name.startswith("v00000008") or path.suffix == ".anchor":
            path.unlink()
    assert same(get_back(filled, 8, held=held), weights(8))
    assert same(dict(held.tensors), weights(7))
    assert same(get_back(filled, 7, held=held), weights(7))


def test_the_way_is_the_one_of_fewest_bytes() -> None:
    def at(version: int) -> Stamp:
        return Stamp.of(version, f"{version:064x}"[::-1])

    sizes = {f"{at(0)}.anchor": 90, f"{at(3)}.anchor": 90}
    sizes |= {f"{at(v)}-on-{str(at(v - 1))[1:]}.delta": 40 for v in range(1, 5)}
    chains = Chains(sizes)
    ways = {
        None: [f"{at(3)}.anchor", f"{at(4)}-on-{str(at(3))[1:]}.delta"],
        at(2): [f"{at(v)}-on-{str(at(v - 1))[1:]}.delta" for v in (3, 4)],
        at(1): [f"{at(v)}-on-{str(at(v - 1))[1:]}.delta" for v in (2, 3, 4)],
        at(0): [f"{at(3)}.anchor", f"{at(4)}-on-{str(at(3))[1:]}.delta"],
        at(4): [],
    }
    for held, expected in ways.items():
        assert list(map(str, chains.way(at(4), held))) == expected


def test_retention_leaves_no_delta_without_its_anchor(tmp_path: Path) -> None:
    """The two newest anchors, and what lies behind them."""
    with storing(tmp_path, keep=2) as writer:
        put(writer, *range(10))
        told = [stored.oldest_version for stored in writer.news()]
    assert told == [0] * 8 + [4, 4]
    assert Chains(place_of(str(tmp_path)).sizes()).reachable() == list(range(4, 10))
    assert len(names(tmp_path)) == 5 + 2
    with pytest.raises(VersionGoneError, match=r"version 3 is no longer .* has: 4 to 9"):
        get_back(tmp_path, 3)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "header"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(filled: Path, damage: str) -> None:
    """Wherever the wrong byte is: in a delta on the way, or its checksum."""
    (path,) = filled.glob("v00000006-*.delta")
    content = bytearray(path.read_bytes())
    places = (
        [20] if damage == "header" else [len(content) // 2, len(content) - 40, len(content) - 1]
    )
    for place in places:
        wrong = bytearray(content)
        wrong[place] ^= 4
        whole = {"cut": content[:place], "empty": b"", "longer": content + b"x"}
        path.write_bytes(whole.get(damage, wrong))
        with pytest.raises(WeightError, match=rf"{path.name} \(policy version 6\)"):
            get_back(filled, 7)
    assert same(get_back(filled, 5), weights(5))


def test_a_delta_whose_anchor_is_gone_is_named(filled: Path) -> None:
    for path in filled.glob("*.anchor"):
        path.unlink()
    told = r"v00000001-\w+-on-00000000-\w+.delta needs v00000000-\w+, of which there is neither"
    with pytest.raises(VersionGoneError, match=told):
        get_back(filled, 6)


def test_weights_of_another_run_are_refused(filled: Path) -> None:
    """By who reads, and by who would write beside them."""
    with pytest.raises(WeightError, match=r"policy version .*of run 'demo', this is 'other'"):
        get_back(filled, 6, run="other")
    before = names(filled)
    with storing(filled, run="other") as writer:
        tensors = weights(10)
        writer.take(manifest_of(10, tensors, None), tensors)
        wait_for(lambda: "has weights of run 'demo', this is 'other'" in writer.trouble)
        writer.close()
    assert names(filled) == before


def test_the_content_must_be_what_the_log_says(filled: Path) -> None:
    """Files that are sound, and of other weights under the same digits."""
    (path,) = filled.glob("v00000004-*.anchor")
    wrong = hash_at(4)[:12] + "0" * 52
    content = path.read_bytes()
    assert hash_at(4).encode() in content
    history = WeightHistory(place_of(str(filled)), "demo")
    with pytest.raises(WeightError, match=rf"{path.name} .*makes weights {hash_at(4)}"):
        history.weights_at(4, wrong, DEADLINE_S)


class FaultyPlace:
    """A place whose writes wait, or fail."""

    def __init__(self, folder: Path) -> None:
        self._place = place_of(str(folder))
        self.error: OSError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    @contextmanager
    def writing(self, name: str, epoch: int) -> Iterator[BinaryIO]:
        with self._place.writing(name, epoch) as out:
            out.write(b"torn")
            out.seek(0)
            self.may_go_on.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
            yield out


def wait_for(reached: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_full_disk_does_not_end_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer says what lacks, tries again, goes on from the last version that is there, and
    names those that were passed over; nothing torn lies about."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    place = FaultyPlace(tmp_path)
    with storing(place) as writer:
        put(writer, 0, 1)
        assert writer.trouble == ""
        place.error = OSError(28, "No space left on device")
        for version in (2, 3, 4):
            tensors = weights(version)
            writer.take(manifest_of(version, tensors, None), tensors)
            wait_for(
                lambda v=version: (
                    f"version {v}: " in writer.trouble and "No space" in writer.trouble
                )
            )
        assert "passed over: 2 to 3" in writer.trouble
        place.error = None
        writer.finish(DEADLINE_S)
        put(writer, 5)
        news = writer.news()
    assert [(one.policy_version, one.missing) for one in news] == [
        (0, ()), (1, ()), (4, (2, 3)), (5, ()),
    ]  # fmt: skip
    assert writer.num_missing == 2
    assert all(same(get_back(tmp_path, version), weights(version)) for version in (1, 4, 5))
    assert [name for name in names(tmp_path) if name.endswith(".tmp")] == []
    with pytest.raises(VersionGoneError, match=r"no file of v00000002.*has: 0 to 1, 4 to 5"):
        get_back(tmp_path, 2)


def test_a_slow_store_passes_versions_over_and_holds_up_nobody(tmp_path: Path) -> None:
    """While one is written the newest waits; a write that lasts is named."""
    place = FaultyPlace(tmp_path)
    with storing(place, deadline_s=0.05) as writer:
        place.may_go_on.clear()
        started_s = time.monotonic()
        for version in range(4):
            tensors = weights(version)
            writer.take(manifest_of(version, tensors, None), tensors)
            wait_for(lambda: writer.trouble != "")
        assert time.monotonic() - started_s < DEADLINE_S / 2
        assert "policy version 0: not written for" in writer.trouble
        assert "passed over: 1 to 2" in writer.trouble
        place.may_go_on.set()
    assert [one.policy_version for one in writer.news()] == [0, 3]


def test_a_trainer_that_begins_anew_goes_on_with_the_store(tmp_path: Path) -> None:
    """It writes nothing twice, names what its predecessor left out, and removes its torn file."""
    with storing(tmp_path) as first:
        put(first, 0, 1, 2)
    torn = tmp_path / "v00000003-aaaaaaaaaaaa.anchor.ab-e1.tmp"
    torn.write_bytes(b"torn")
    before = names(tmp_path)
    with storing(tmp_path, epoch=2) as second:
        put(second, 2, 3)
        news: list[Stored] = list(second.news())
    assert [(one.policy_version, len(one.files)) for one in news] == [(2, 0), (3, 1)]
    assert len(names(tmp_path)) == len(before)  # one more, the torn one less
    with storing(tmp_path, epoch=3) as third:
        put(third, 6)
        (stored,) = third.news()
    assert stored.missing == (4, 5)
    assert same(get_back(tmp_path, 6), weights(6))


def test_a_second_content_of_a_version_is_refused(filled: Path) -> None:
    before = names(filled)
    with storing(filled, epoch=2) as writer:
        tensors = weights(99)
        writer.take(manifest_of(9, tensors, None), tensors)
        wait_for(lambda: "has policy version 9 as v00000009" in writer.trouble)
        writer.close()
    assert names(filled) == before


def test_an_anchor_that_somebody_removed_is_made_anew(tmp_path: Path) -> None:
    """Else nothing behind it could ever be read."""
    with storing(tmp_path) as writer:
        put(writer, 0, 1)
        for path in tmp_path.iterdir():
            path.unlink()
        put(writer, 2)
    assert [".anchor"] == [path.suffix for path in tmp_path.iterdir()]
    assert same(get_back(tmp_path, 2), weights(2))


def test_a_store_that_hangs_is_left_at_the_deadline(filled: Path) -> None:
    class Hanging(FaultyPlace):
        def sizes(self) -> Any:
            self.may_go_on.wait(DEADLINE_S)
            return self._place.sizes()

    place = Hanging(filled)
    place.may_go_on.clear()
    with pytest.raises(WeightError, match=r"version 6 from store .*: not read within 0.05 s"):
        WeightHistory(place, "demo").weights_at(6, hash_at(6), 0.05)
    place.may_go_on.set()


def test_a_url_is_a_store_as_a_folder_is(filled: Path) -> None:
    """By fsspec, which torch brings; the same files, and retention works there."""
    url = f"memory://{filled.parent.name}/store"
    with storing(place_of(url), keep=1) as writer:
        put(writer, *range(6))
    place = place_of(url)
    assert Chains(place.sizes()).reachable() == [4, 5]
    found = WeightHistory(place, "demo").weights_at(5, hash_at(5), DEADLINE_S)
    assert same(dict(found.tensors), weights(5))
    assert not [name for name in place.sizes() if name.endswith(".tmp")]
    with pytest.raises(WeightError, match=r"store.url 'nosuch://x' cannot be opened"):
        place_of("nosuch://x")


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    """The run goes on; a file stands where the folder should be, which no user may write into."""
    (tmp_path / "store").write_text("in the way")
    with storing(tmp_path / "store") as writer:
        tensors = weights(0)
        writer.take(manifest_of(0, tensors, None), tensors)
        wait_for(lambda: str(tmp_path / "store") in writer.trouble)
        writer.close()
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
