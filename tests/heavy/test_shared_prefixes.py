"""Tokens that several documents begin with, computed once: what each gives that is computed alone.

`tests/documents_on_cpu.py` stands in for the kernel. What lies around it, of keys that are laid
out and gradients that are summed, is the product's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.debug.rerun.findings import _cut_again
from rlstreams.schemas.events import ScoredTrajectory, Segment, Tensor
from rlstreams.streams.rows import scored_rows
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import LoraSection, OptimizerSection, TrainerSection
from rlstreams.workers.model import bins, documents
from rlstreams.workers.model.attention import attention_of
from rlstreams.workers.model.cut import Cut
from rlstreams.workers.model.documents import Documents, use_documents
from rlstreams.workers.model.families import SDPA
from rlstreams.workers.model.model import configure_torch, load_model, right_padded
from rlstreams.workers.model.prefixes import NOTHING_TAKEN, Prefixes, Taken, Tokens
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.trainer.learn.cutting import prefixes_of
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.documents_on_cpu import one_by_one, take_documents_on_cpu
from tests.unit.trainer.trainer_builders import (
    floats,
    ids,
    packed_within,
    policy_segment,
    prompt_segment,
    score,
    scored,
)

configure_torch(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
EXACT, TOLERANCE = 1e-12, 1e-5


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    take_documents_on_cpu(monkeypatch.setattr)
    monkeypatch.setattr(bins, "compile_for_bins", lambda *_, **__: "not here")


def tree(random: np.random.Generator) -> list[list[int]]:
    """A group, turns of a dialogue that begins as its prompt does, and one by itself."""

    def drawn(num: int) -> list[int]:
        return random.integers(3, families.VOCABULARY, num).tolist()

    prompt = drawn(7)
    turn, found = prompt[:4], [prompt + drawn(num) for num in (5, 1, 9)]
    for num in (3, 4, 2):
        turn = turn + drawn(num)
        found.append(turn)
    return [*found, found[0], drawn(1), drawn(6)]


@pytest.mark.parametrize("window", [-1, 3])
def test_one_operation_is_the_sum_over_its_paths(window: int) -> None:
    """Outputs and gradients, by autograd of plain operations, and of a row that shares nothing."""
    sequences = tree(np.random.default_rng(0))
    lengths = [len(own) for own in sequences]
    taken = Prefixes([Tokens(np.array(own)) for own in sequences]).taken(range(len(sequences)))
    size = sum(lengths) - sum(own.tokens for own in taken) + 3
    row = Documents.of(lengths, size, taken)
    assert row.shared is not None
    shared = row.shared
    given = [torch.randn(size, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weights = torch.randn(size, 4, 8, dtype=torch.float64)

    def passed(call: Any, places: torch.Tensor, documents: Documents, *more: Any) -> Any:
        learnt = [t.clone().requires_grad_() for t in given]
        query, key, value = (t[places] for t in learnt)
        rest = documents.starts, documents.extent, 0.3, window
        output = torch.zeros_like(query)
        output = call(query, key, value, *rest, *more)[0]
        # Each token once, where it first lies.
        first = np.unique(places.numpy(), return_index=True)[1]
        output = output[torch.from_numpy(first)]
        return output.detach(), *torch.autograd.grad((output * weights).sum(), learnt)

    places = torch.from_numpy(row.places(sum(lengths)))
    every = torch.cat([places, torch.arange(size - 3, size)])
    tables = shared.keys, shared.starts, shared.own, shared.tree
    expected = passed(documents._fused, every, Documents.of(lengths, sum(lengths) + 3))
    for call in (documents._fused, one_by_one):
        for one, other in zip(
            expected, passed(call, torch.arange(size), row, *tables), strict=True
        ):
            assert float((one - other).abs().max()) < EXACT


def test_a_model_of_a_tree_is_the_sum_over_its_paths(tmp_path: Path) -> None:
    """Hidden states of all tokens of all paths, and the gradient of all weights, in float64; of
    layers whose window ends within a document."""
    model: Any = load_model(families.make("Starcoder2ForCausalLM", tmp_path)).double()
    scorer = TokenScorer(model.requires_grad_(True), attention_of(model).right_padded)
    use_documents(model)
    sequences = tree(np.random.default_rng(1))
    lengths = [len(own) for own in sequences]
    taken = Prefixes([Tokens(np.array(own)) for own in sequences]).taken(range(len(sequences)))
    size = sum(lengths) - sum(own.tokens for own in taken) + 2
    row = Documents.of(lengths, size, taken)
    places = torch.from_numpy(row.places(sum(lengths)))
    ids_1T = torch.zeros(1, size, dtype=torch.int64)
    ids_1T[0, places] = torch.tensor([token for own in sequences for token in own])
    ids_BT, real_BT = right_padded(sequences, 0)
    padded = scorer.inputs(ids_BT, real_BT, None), real_BT
    found = []
    for inputs, chosen in (padded, (scorer.inputs(ids_1T, None, row), (0, places))):
        hidden_NH = model.model(**inputs).last_hidden_state[chosen]
        weights = torch.randn(hidden_NH.shape, dtype=torch.float64, generator=_generator())
        loss = (hidden_NH * weights).sum()
        parameters = list(model.model.parameters())
        found.append((loss.detach(), hidden_NH.detach(), *torch.autograd.grad(loss, parameters)))
    for one, other in zip(*found, strict=True):
        scale = max(1.0, float(one.abs().max()))
        assert float((one - other).abs().max()) / scale < EXACT


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def samples_of(*, is_routed: bool = False) -> list[ScoredTrajectory]:
    """Groups of several prompts and lengths, one of which is longer than windows are; then one
    whose samples go on from each other, so that a token is learnt from in several; its last has a
    branch."""
    random, found = np.random.default_rng(2), []

    def logprobs(num: int) -> list[float]:
        return (-random.uniform(0.5, 3.0, num)).tolist()

    def add(group: int, sample: int, *segments: Segment) -> None:
        policy = [n for n, s in enumerate(segments) if s.author == "policy"]
        scores = [
            replace(score(n, logprobs(num)), reference_logprobs=floats(logprobs(num)))
            for n in policy
            for num in [len(segments[n].token_ids)]
        ]
        one = scored(
            segments, scores, group=str(group), sample=sample, reward=float(random.integers(0, 2))
        )
        routes = {"routed_experts": Tensor.of(routes_of(one, group, sample))} if is_routed else {}
        found.append(replace(one, trajectory=replace(one.trajectory, **routes)))

    def answer(num: int) -> Segment:
        return policy_segment(random.integers(0, 12, num), logprobs(num), temperature=0.7)

    for group, (prompt, answers) in enumerate([(9, (5, 2, 1)), (4, (3, 8, 3)), (1, (2, 6, 4))]):
        first = prompt_segment(random.integers(0, 12, prompt))
        for sample, num in enumerate(answers):
            add(group, sample, first, answer(num))
    segments = [prompt_segment(random.integers(0, 12, 3))]
    for sample in range(4):
        segments.append(answer(3))
        add(3, sample, *segments)
        segments.append(Segment(author="environment", token_ids=ids(random.integers(0, 12, 2))))
    begun = np.concatenate([segment.token_ids.numpy() for segment in segments[:3]])
    add(3, 4, *segments[:2], prompt_segment(begun), answer(4))
    return [found[index] for index in random.permutation(len(found))]


def routes_of(one: ScoredTrajectory, group: int, sample: int) -> Any:
    """Of two layers; a group's samples took the same, but for one that differs in its prompt."""
    num = sum(len(segment.token_ids) for segment in one.trajectory.segments) - 1
    first = np.random.default_rng(group).integers(0, 2, (40, 2, 1))[:num].astype(np.uint8)
    if (group, sample) == (0, 1):
        first[4] = 1 - first[4]
    return np.concatenate([first, first + np.uint8(2)], -1)


CRITIC = LossSection(advantage="gae", gae_lambda=0.9)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all before it": ("Qwen3ForCausalLM", {"minibatches": 2, "activation_checkpointing": True}),
    "a window": ("MistralForCausalLM", {}),
    "windows in some layers": ("Gemma3ForCausalLM", {}),
    "adapters": ("Qwen3ForCausalLM", {"lora": LoraSection(rank=2)}),
    "a critic": ("Qwen3ForCausalLM", {"loss": CRITIC}),
    "a reference": ("Qwen3ForCausalLM", {"loss": LossSection(kl_coef=0.1, entropy_coef=0.01)}),
    "replayed routes": ("MixtralForCausalLM", {"routing_replay": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_shared_tokens_is_that_of_whole_rows(case: str, tmp_path: Path) -> None:
    """Loss, gradient and what is told of both; done again from its cut, the same bits; a cut of it
    can be done without."""
    name, changes = CASES[case]
    folder = families.make(name, tmp_path, **({"sliding_window": 5} if "window" in case else {}))
    section = TrainerSection(
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, beta1=0.0, max_grad_norm=1e9),
        micro_batch_tokens=48,
        groups_per_step=4,
        **changes,
    )
    samples = samples_of(is_routed=section.routing_replay)
    made = []
    cut: Cut | None = None
    for shares, given in ((False, False), (True, False), (True, True), (False, True)):
        training = Training(folder, replace(section, shared_prefixes=shares), threads=1)
        assert not training.learner.why_unshared
        if case == "a critic":
            _give_values(training)
        advantages = training._advantages(samples)
        batch, result = training._step(samples, advantages, [], 2, cut if given else None, ())
        cut = batch.cut if shares else cut
        of = {n: t for n, t in training.learner.optimizer_tensors().items() if "exp_avg" in n}
        weights = weight_hash(training.learner.weights())
        made.append((result, of, weights, batch))
    whole, once, again, unlike = made
    assert whole[3].figures()["tokens_shared"] == unlike[3].figures()["tokens_shared"] == 0
    assert once[3].figures()["tokens_shared"] > 40
    assert once[0].metrics["tokens_computed"] < whole[0].metrics["tokens_computed"]
    assert again[0] == once[0]
    assert again[2] == once[2]
    for other in (once, unlike):
        assert other[0].loss == pytest.approx(whole[0].loss, abs=TOLERANCE)
        assert whole[1].keys() == other[1].keys()
        for key, moment in whole[1].items():
            assert float((moment - other[1][key]).abs().max()) < TOLERANCE, key
    assert max(float(moment.abs().max()) for moment in whole[1].values()) > 100 * TOLERANCE
    by_row = {"tokens_computed", "tokens_shared", "routing_flips", "routing_recorded"}
    told = {key: value for key, value in whole[0].metrics.items() if key not in by_row}
    assert {key: once[0].metrics[key] for key in told} == pytest.approx(told, rel=1e-3, abs=1e-5)


def _give_values(training: Training) -> None:
    """A head whose values are not all 0, so that its gradient passes on into the model."""
    head = training.learner._shards.root.value_head
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=_generator()))


def test_a_row_of_what_several_take_adds_up_in_float32() -> None:
    """Of a hidden state that many tokens follow: eight small terms beside a large one count."""
    from rlstreams.workers.model.token_scores import _Rows

    values = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    places = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    taken = _Rows.apply(values, places)
    weights = torch.tensor([256.0] + [0.5] * 8 + [3.0], dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad((taken * weights[:, None]).sum(), values)
    assert gradient[:, 0].tolist() == [0, 260, 3]


def test_keys_add_up_in_float32() -> None:
    """Of a prompt that eight answers see: what they add to it, in bfloat16, is too little to count
    one by one."""
    taken = (NOTHING_TAKEN, *[Taken(0, 3)] * 8)
    row = Documents.of([4] * 9, 12, taken)
    assert row.shared is not None
    tables = row.shared.keys, row.shared.starts, row.shared.own, row.shared.tree
    given = [torch.zeros(12, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    output_ThD = documents._fused(*given, row.starts, row.extent, 1.0, -1, *tables)[0]
    # The last of four sees four keys alike: a quarter of its gradient is each one's.
    weights_T = torch.tensor([0, 0, 0, 1024.0] + [2.0] * 8, dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad((output_ThD * weights_T[:, None, None]).sum(), given[2])
    assert gradient[:, 0, 0].tolist() == [260, 260, 260, 256] + [0.5] * 8


def test_a_family_whose_shared_tokens_differ_has_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start measures: here of keys that are laid out wrongly."""
    model: Any = load_model(families.make("Qwen3ForCausalLM", tmp_path))
    scorer = TokenScorer(model, attention_of(model).right_padded)
    assert not bins.take_documents(scorer, "cpu")
    assert not bins.why_unshared(scorer)
    plain = documents._laid_out

    def turned(*given: Any) -> Any:
        key, *more = plain(*given)
        return key.flip(0), *more

    monkeypatch.setattr(documents, "_laid_out", turned)
    assert "documents that share tokens are" in bins.why_unshared(scorer)


@pytest.mark.parametrize(("more", "seen"), [(-100, 130), (1, 101), (-1, 99)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_documents_do_not_keep_is_found(
    dtype: str, more: int, seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at all, and one of a token more or less: exactly, for no rounding is involved."""
    folder = families.make("MistralForCausalLM", tmp_path, sliding_window=100)
    model: Any = load_model(folder, dtype)
    scorer = TokenScorer(model, attention_of(model).right_padded)
    assert not bins.take_documents(scorer, "cpu")
    assert not bins.why_unshared(scorer)
    plain = documents._kernel
    monkeypatch.setattr(documents, "_kernel", lambda *given: plain(*given[:-1], given[-1] + more))
    told = f"in layer 0, {seen} of 130 tokens see the first one, in padded rows 100"
    assert bins.why_unshared(scorer) == f"of documents that share tokens: {told}"
    model.config._attn_implementation = SDPA
    monkeypatch.setattr(bins, "TOLERANCE", 9.0)
    assert bins.take_documents(scorer, "cpu") == f"of documents in one row: {told}"
    assert model.config._attn_implementation == SDPA


def test_a_redone_step_is_planned_as_it_was() -> None:
    """`replay step` compares its micro-batches with those that are planned now: of the same bins,
    with tokens shared if they were."""
    samples, cuts = samples_of(), []
    rows = [row for sample in samples for row in scored_rows(sample)]
    for shares in (False, True):
        prefixes = prefixes_of(rows, replay_routes=False) if shares else None
        batch = packed_within(
            rows, np.zeros(len(rows), np.float32), [],
            policy_version=2, token_budget=48, in_bins=True, prefixes=prefixes,
        )  # fmt: skip
        step: Any = SimpleNamespace(
            payloads=[SimpleNamespace(scored=sample) for sample in samples],
            again=SimpleNamespace(batch=batch),
            recorded=SimpleNamespace(bins=batch.cut.bins),
        )
        cuts.append(_cut_again(step, TrainerSection(micro_batch_tokens=48)))
        assert cuts[-1] == batch.cut
    assert len(cuts[0].sizes) > len(cuts[1].sizes)
