"""The scorer in bins, with compiled layers: the log-probs of padded rows, the same bits always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.workers.compute.forward import Forward, ForwardPart
from rlstreams.workers.compute.score import MeshScorer, scorer_of
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import FolderChannel
from tests import families
from tests.documents_on_cpu import take_documents_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
BIN = 192  # tokens: bins of 192 and of 128


def sequences_of(lengths: Sequence[int], routes: tuple[int, int] | None = None) -> Any:
    random = np.random.default_rng(3)
    return [
        TokenSequence(
            token_ids=random.integers(3, families.VOCABULARY, length).astype(np.int32),
            routed_experts=None
            if routes is None
            else random.integers(0, 2, (length - 1, *routes), np.uint8) + np.uint8([0, 2]),
        )
        for length in lengths
    ]


def related(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """The third begins with 30 tokens of the first, the eighth with 41 of the third; the sixth with
    20 of the first, of which one went to other experts."""
    for to, of, num in ((2, 0, 30), (7, 2, 41), (5, 0, 20)):
        own = replace(sequences[to], group_id="of some")
        own.token_ids[:num] = sequences[of].token_ids[:num]
        if own.routed_experts is not None:
            own.routed_experts[:num] = sequences[of].routed_experts[:num]
        sequences[to] = own
    if (routed := sequences[5].routed_experts) is not None:
        routed[0] = 3 - routed[0]
    return sequences


def scores(scorer: MeshScorer, channel: FolderChannel, sequences: Any) -> list[Any]:
    scorer.pull(channel.published, channel)
    return [
        np.concatenate([found.logprobs, found.entropy])
        for found in scorer.score(sequences, channel.published.policy_version, 0.7)
    ]


@pytest.mark.parametrize(
    ("name", "routes", "compiler"),
    [
        ("Qwen3ForCausalLM", None, "aot_eager"),
        pytest.param("Qwen3ForCausalLM", None, "inductor", marks=pytest.mark.slow),
        ("MixtralForCausalLM", (2, 2), "aot_eager"),
    ],
)
def test_bins_give_what_padded_rows_give(
    name: str,
    routes: tuple[int, int] | None,
    compiler: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences of one token too, such as begin alike, and experts that are replayed, once other
    ones in what is alike; the same call, the same bits."""
    folder = families.make(name, tmp_path)
    channel = FolderChannel(folder)
    sequences = related(sequences_of([40, 1, 64, 17, 2, 58, 33, 64, 5], routes))
    along = {"replay_routes": routes is not None, "token_budget": BIN}
    padded = scorer_of(folder, **along)  # type: ignore[arg-type]
    assert padded.why_padded == "a CPU computes padded rows"
    expected = scores(padded, channel, sequences)
    take_documents_on_cpu(monkeypatch.setattr, compiler)
    packed = scorer_of(folder, **along)  # type: ignore[arg-type]
    assert not packed.why_padded
    assert bool(packed.why_eager) == (routes is not None)  # experts are not compiled
    found = scores(packed, channel, sequences)
    again = scores(packed, channel, sequences)
    whole = scorer_of(folder, shared_prefixes=False, **along)  # type: ignore[arg-type]
    parts: list[ForwardPart] = []

    def noted(forward: Forward, part: ForwardPart, temperature: float) -> Any:
        parts.append(part)
        return forward(part, temperature)

    for scorer in (packed, whole):
        scorer._forward = partial(noted, scorer._forward)  # type: ignore[assignment]
    for each in zip(
        expected, found, again, scores(packed, channel, sequences),
        scores(whole, channel, sequences), strict=True,
    ):  # fmt: skip
        one, other, third, fourth, apart = each
        np.testing.assert_allclose(one, other, atol=2e-4)
        np.testing.assert_allclose(one, apart, atol=2e-4)
        assert other.tobytes() == third.tobytes() == fourth.tobytes()
    taken = [sum(own.tokens for own in part.taken or ()) for part in parts]
    assert sum(taken) == 30 + 41 + (0 if routes else 20)
    assert {part.taken is None for part in parts} == {True, False}


def test_all_versions_and_bins_use_what_was_compiled_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No window waits for a compiler, whatever its version and size."""
    from torch._dynamo.utils import counters

    take_documents_on_cpu(monkeypatch.setattr)
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    scorer, channel = scorer_of(folder, token_budget=BIN), FolderChannel(folder)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled
    first = scores(scorer, channel, sequences_of([64]))
    changed = {name: tensor + 0.01 for name, tensor in channel._weights.items()}
    other = FolderChannel(folder)
    other._weights = changed
    other.published = replace(other.published, policy_version=1)
    second = scores(scorer, other, sequences_of([64, 64, 64, 30]))
    assert np.abs(first[0] - second[0]).max() > 1e-3
    scorer.drop(other.published.policy_version)
    assert scores(scorer, channel, sequences_of([64]))[0].tobytes() == first[0].tobytes()
    assert counters["stats"]["unique_graphs"] == compiled


def test_each_forward_takes_its_shift_on_a_shared_gpu(tmp_path: Path) -> None:
    """One shift for each part of a window, and shifts change no bit."""
    folder = families.make("Qwen3ForCausalLM", tmp_path)
    channel, sequences = FolderChannel(folder), sequences_of([40, 64, 17, 58, 33])
    scorer = scorer_of(folder, token_budget=BIN)
    alone, shifts = scores(scorer, channel, sequences), []

    def run(work: Any) -> Any:
        shifts.append(work)
        return work()

    scorer.run = run
    shared = scores(scorer, channel, sequences)
    assert all((one == other).all() for one, other in zip(alone, shared, strict=True))
    assert 2 == len(shifts)
