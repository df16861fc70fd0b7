"""A checkpoint is whole or it is not there, and the ledger chooses."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from rlstreams.streams.ledger import Ledger
from rlstreams.workers.trainer.training.checkpoint import (
    PIECE_BYTES,
    CheckpointStore,
    Manifest,
    objection,
    piecewise_sha256,
)
from tests.branch_events import run_branched
from tests.factories import trainer_started

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
BRANCH = run_branched(step=30, policy_version=30, weight_hash="base")
OPTIMIZER = {"a:exp_avg": torch.full((2, 3), 0.5), "a:step": torch.tensor(3.0)}


def manifest(step=3, epoch=1) -> Manifest:
    return Manifest(
        run="demo",
        epoch=epoch,
        step=step,
        policy_version=step,
        weight_hash=f"{step:064d}",
        rng="00ff",
        versions={"torch": "2"},
    )


def store_with(folder, *keys) -> CheckpointStore:
    store = CheckpointStore(folder)
    for epoch, step in keys:
        store.save(manifest(step, epoch), WEIGHTS, OPTIMIZER)
    return store


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def reasons(found):
    return [(passed.checkpoint, passed.reason) for passed in found.passed_over]


@pytest.mark.parametrize(
    ("keys", "newest"),
    [([(1, 9), (2, 4)], "000001-00000009"), ([(1, 9), (2, 9)], "000002-00000009")],
)
def test_the_highest_step_is_the_newest(tmp_path, keys, newest):
    """An earlier epoch may have come further; of equal steps the later epoch's is taken."""
    found = store_with(tmp_path, *keys).newest(lambda _: "")
    assert found.manifest.name == newest


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_file_is_noticed(tmp_path, name):
    """One flipped byte and the one before is taken."""
    store = store_with(tmp_path, (1, 3), (1, 5))
    path = tmp_path / "000001-00000005" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = store.newest(lambda _: "")
    assert found.manifest.step == 3
    assert f"{name} has hash" in found.passed_over[0].reason


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_each_piece_of_a_file_counts_by_its_own_digest(size, tmp_path):
    """Whatever thread read it. An empty file has no piece; the last one may be short."""
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    assert piecewise_sha256(tmp_path / "file") == expected.hexdigest()


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"run": 1, "surprise": 2}'])
def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path, content):
    """Missing, empty or foreign manifests are reasons, not errors."""
    store = store_with(tmp_path, (1, 5))
    path = tmp_path / "000001-00000005" / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    found = store.newest(lambda _: "")
    assert found.manifest is None
    assert "cannot read manifest.json" in found.passed_over[0].reason


def test_a_folder_under_another_name_is_passed_over(tmp_path):
    """A copy that was renamed by hand does not claim another step."""
    store = store_with(tmp_path, (1, 5))
    (tmp_path / "000001-00000005").rename(tmp_path / "000001-00000007")
    expected = [("000001-00000007", "manifest.json is of 000001-00000005")]
    assert reasons(store.newest(lambda _: "")) == expected


def test_what_a_dead_writer_left_is_cleaned(tmp_path):
    """Half-written folders are neither taken nor kept; strangers' files are left alone."""
    store = store_with(tmp_path, (1, 3))
    (tmp_path / ".tmp-000001-00000004").mkdir()
    (tmp_path / ".tmp-000001-00000004" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    store.clean(epoch=2)
    found = store.newest(lambda _: "")
    assert (found.manifest.step, found.passed_over) == (3, ())
    assert names(tmp_path) == ["000001-00000003", "notes.txt"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    """Tensors that cannot be written leave no trace, and the older checkpoint stands."""
    store = store_with(tmp_path, (1, 3))
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        store.save(manifest(3), {"a": shared, "b": shared}, OPTIMIZER)
    assert names(tmp_path) == ["000001-00000003"]
    assert store.newest(lambda _: "").manifest is not None


def test_prune_keeps_what_was_written_last(tmp_path):
    """By epoch first: a new epoch's lower steps outlive an older epoch's higher ones."""
    store = store_with(tmp_path, (1, 10), (1, 40), (2, 15), (2, 20))
    assert store.prune(2, epoch=2) == ["000001-00000040", "000001-00000010"]
    assert names(tmp_path) == ["000002-00000015", "000002-00000020"]


def test_what_a_branch_begins_with_is_kept(tmp_path):
    """Of epoch 0, which nobody claims: its first steps are done again from it."""
    store = store_with(tmp_path, (0, 30), (1, 31), (1, 32))
    assert store.prune(1, epoch=1) == ["000001-00000031"]
    assert names(tmp_path) == ["000000-00000030", "000001-00000032"]


@pytest.mark.parametrize(
    ("begin", "step", "text", "told"),
    [
        (BRANCH, 30, "base", ""),
        (BRANCH, 29, "base", "step 29 with weights base is not what the branch begins with"),
        (BRANCH, 30, "other", "step 30 with weights other is not what"),
        (None, 30, "base", "the ledger does not begin as a branch"),
    ],
)
def test_a_base_is_held_against_what_the_branch_says(begin, step, text, told):
    """No claim names epoch 0, so only that event can confirm it."""
    ledger = Ledger(keeps_steps=True)
    for event in filter(None, [begin, trainer_started()]):
        assert ledger.apply(event)
    found = Manifest(run="run", epoch=0, step=step, policy_version=30, weight_hash=text)
    assert told in objection("run", ledger, found)
    assert bool(told) == bool(objection("run", ledger, found))


def test_a_fenced_writer_prunes_only_its_own_and_older_ones(tmp_path):
    """A trainer that wakes up beside its successor removes nothing of the successor's."""
    store = store_with(tmp_path, (1, 10), (1, 20), (2, 30), (2, 40))
    assert store.prune(1, epoch=1) == ["000001-00000010"]
    assert names(tmp_path) == ["000001-00000020", "000002-00000030", "000002-00000040"]


def test_a_fenced_writer_cleans_only_after_its_own_and_older_ones(tmp_path):
    """What its successor is writing, or removing, is none of its business."""
    kept = [".tmp-000002-00000007", ".tmp-removed-000002-00000005", ".tmp-removed-mine"]
    for name in (*kept, ".tmp-000001-00000006", ".tmp-removed-000001-00000003"):
        (tmp_path / name).mkdir()
    CheckpointStore(tmp_path).clean(epoch=1)
    assert names(tmp_path) == kept


def test_what_another_trainer_removes_meanwhile_is_removed(tmp_path, monkeypatch):
    """A trainer that wakes up and its successor may prune the same one."""
    store = store_with(tmp_path, (1, 10), (1, 20))
    (tmp_path / "000001-00000010").rename(tmp_path / "elsewhere")
    listed = ["000001-00000020", "000001-00000010"]
    monkeypatch.setattr(CheckpointStore, "_names", lambda _: listed)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    assert store.prune(1, epoch=1) == listed[1:]
