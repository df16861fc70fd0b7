"""A follower of the weight store carries the sums of a version on, and finds every wrong bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link import weight_hash as hash_module
from rlstreams.workers.weights.store import delta, version_file
from rlstreams.workers.weights.store import sums as sums_module
from rlstreams.workers.weights.store.delta import Changed, Words, pieces_of
from rlstreams.workers.weights.store.history import WeightHistory
from rlstreams.workers.weights.store.place import place_of
from tests.unit.weights.stores import DEADLINE_S, Tensors, put, read, storing


def few_moved(version: int) -> Tensors:
    """In each version a few words of each tensor are others, in some of its pieces."""
    some = torch.Generator().manual_seed(1)
    bits = {name: torch.randint(-90, 90, (200,), generator=some) for name in "abcd"}
    for number in range(version):
        for content in bits.values():
            content[3 + number :: 97] += 1 + number
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64)
    kinds = (torch.int8, torch.bfloat16, torch.float32, torch.float64)
    return {
        name: content.to(dtype).view(kind)[:199]
        for (name, content), dtype, kind in zip(bits.items(), dtypes, kinds, strict=True)
    }


def test_a_follower_sums_what_a_delta_changed_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of words of each size, in several pieces; the sums are those of all bytes."""

    def sums_of(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
        summed.append(tensor.numel())
        return whole(tensor, start)

    summed: list[int] = []
    whole = hash_module.sums_of
    for one in (delta, sums_module):
        monkeypatch.setattr(one, "PIECE_WORDS", 80)
    with storing(tmp_path, anchor_every=100) as writer:
        put(writer, *range(4), content=few_moved)
    hashes = [weight_hash(few_moved(version)) for version in range(4)]
    history = WeightHistory(place_of(str(tmp_path)), "demo")
    held = history.weights_at(0, hashes[0], DEADLINE_S)
    monkeypatch.setattr(hash_module, "sums_of", sums_of)
    for version in (1, 2, 3):
        held = history.weights_at(version, hashes[version], DEADLINE_S, held)
        for name, tensor in few_moved(version).items():  # some are no numbers
            assert torch.equal(held.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    assert summed == []
    assert held.sums == history.weights_at(3, hashes[3], DEADLINE_S).sums
    assert summed == [80, 80, 39] * 4


@pytest.mark.parametrize("name", ["big", "z", "mask", "buffer", "scale"])
def test_a_flipped_bit_in_memory_is_found(filled: Path, name: str) -> None:
    """Also in a word that no delta changes, of a version that was right when it was read."""
    held = read(filled, 2)
    num = held.tensors[name].numel()
    for place in range(0, num, 1 + num // 40):  # of 2,112 every 53rd: in rows that move, and not
        tensors = {other: tensor.clone() for other, tensor in held.tensors.items()}
        pieces_of(tensors[name])[0][place] ^= 1
        with pytest.raises(WeightError, match=r"v00000003-.*policy version 3"):
            read(filled, 3, held=replace(held, tensors=tensors))


@pytest.mark.parametrize("of", ["v00000004-*.anchor", "v00000005-*.delta"])
def test_a_wrong_word_in_a_sound_file_is_found(
    filled: Path, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that was wrong before the file and its checksums were written."""
    apply = version_file.apply

    def flipped(form: int, data: bytes, words: Words) -> Changed | None:
        changed = apply(form, data, words)
        if len(words) > 100:
            words[77] ^= 1 << 9
        return changed

    (path,) = filled.glob(of)
    number = int(path.name[1:9])
    held = read(filled, number - 1) if path.suffix == ".delta" else None
    monkeypatch.setattr(version_file, "apply", flipped)
    with pytest.raises(WeightError, match=rf"v0000000{number}-"):
        read(filled, number, held=held)
