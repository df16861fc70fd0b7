"""The loss of a session with branches is that of its paths, each answer learnt from once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rlstreams.schemas.events import CallCommitted, MaskedSegment, ScoredTrajectory
from rlstreams.streams.rows import scored_rows
from rlstreams.streams.sessions.chain import main_chain, segments_of
from rlstreams.streams.sessions.session import Node, Session
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.logprob.scoring import score_window
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.trainer.learn.loss import policy_losses, reduced
from tests.call_events import call_committed, session_opened
from tests.unit.sessions.test_fold import folded
from tests.unit.trainer.trainer_builders import (
    VOCAB_SIZE,
    TinyModel,
    ids,
    packed_within,
    policy_segment,
    random_samples,
    score,
    scored,
)

ADVANTAGES = np.array([0.7, -1.3, 0.4], np.float32)


def session(random: np.random.Generator) -> Session:
    """Two turns and a third; a fork behind the first, gone on with; a history written anew."""
    ends: dict[str | None, int] = {None: 0}
    events = []
    for name, parent in (("a", None), ("b", "a"), ("d", "a"), ("e", "d"), ("c", "b"), ("f", None)):
        new, said = random.integers(1, 4, 2)
        ends[name] = ends[parent] + new + said
        events.append(
            call_committed(
                call_id=name,
                parent=parent,
                request_hash=name,
                prompt_tokens=int(ends[parent] + new),
                new_ids=ids(random.integers(0, VOCAB_SIZE, new)),
                segments=(
                    policy_segment(
                        random.integers(0, VOCAB_SIZE, said), -random.uniform(0.5, 3, said)
                    ),
                ),
            )
        )
    return folded(session_opened(branches=True), *events)


def sample_of(of: Session, random: np.random.Generator) -> ScoredTrajectory:
    segments = segments_of(main_chain(of))
    proximal = {
        n: np.minimum(s.behavior_logprobs.numpy() + random.normal(0, 0.1, len(s.token_ids)), 0)
        for n, s in enumerate(segments)
        if s.behavior_logprobs is not None
    }
    return scored(segments, [score(n, own) for n, own in proximal.items()], group="0", sample=0)


def logprobs(model: TinyModel, tokens: list[int]) -> Tensor:
    """Of each token but the first, in its sequence, [T - 1]."""
    ids_BT = torch.tensor([tokens])
    causal = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
    logits = model(ids_BT, causal, torch.arange(len(tokens))[None], False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0]


def by_rows(
    model: TinyModel, samples: list[ScoredTrajectory], by: LossSection, budget: int
) -> Tensor:
    """As a step takes it: rows, cut into micro-batches."""
    own = [scored_rows(sample) for sample in samples]
    places = [place for place, rows in enumerate(own) for _ in rows]
    rows = [row for some in own for row in some]
    batch = packed_within(rows, ADVANTAGES[places], (), policy_version=0, token_budget=budget)
    shares = []
    for part in batch.micro_batches:
        found = []
        for ids_T, real_T, mask_T in zip(
            part.token_ids_BT, part.real_BT, part.loss_mask_BT, strict=True
        ):
            found.append(logprobs(model, ids_T[real_T].tolist())[mask_T[real_T][1:]])
        mask_BT = part.loss_mask_BT
        losses = policy_losses(
            torch.cat(found),
            torch.tensor(part.proximal_logprobs_BT[mask_BT]).double(),
            torch.tensor(part.behavior_logprobs_BT[mask_BT]).double(),
            torch.tensor(part.advantages_N).double(),
            part.loss_tokens_by_row,
            by,
        )
        shares_R = part.shares_R
        shares.append(
            reduced(
                losses.losses_N,
                part.loss_tokens_by_row,
                by,
                num_batch_tokens=part.num_batch_loss_tokens,
                num_batch_learnt=part.num_batch_learnt,
                num_batch_samples=part.num_batch_samples,
                shares_R=None if shares_R is None else torch.tensor(shares_R).double(),
            )
        )
    return torch.stack(shares).sum()


def by_paths(
    model: TinyModel, of: Session, plain: list[ScoredTrajectory], first: ScoredTrajectory,
    by: LossSection,
) -> Tensor:  # fmt: skip
    """Of a tree: every path from its root to a leaf, and of each call the tokens once."""
    proximal = {
        id(first.trajectory.segments[s.segment].token_ids): s.proximal_logprobs
        for s in first.scores
    }
    leaves = [n for n in of.nodes.values() if n not in {m.parent for m in of.nodes.values()}]
    seen: set[Node] = set()
    of_tree = []
    for leaf in leaves:
        tokens: list[int] = []
        picked = []
        for node in leaf.path:
            tokens += node.call.new_ids.numpy().tolist()
            segment = node.call.segments[0]
            start, said = len(tokens), segment.token_ids.numpy().tolist()
            tokens += said
            if node not in seen:
                picked.append((slice(start - 1, start - 1 + len(said)), node.call))
        seen |= set(leaf.path)
        found = logprobs(model, tokens)
        of_tree += [_losses(found[at], call, proximal, by) for at, call in picked]
    sums = [torch.cat(of_tree)]
    for place, sample in enumerate(plain, start=1):
        prompt, answer = sample.trajectory.segments
        whole = [*prompt.token_ids.numpy().tolist(), *answer.token_ids.numpy().tolist()]
        found = logprobs(model, whole)[len(prompt.token_ids) - 1 :]
        told = (sample.scores[0].proximal_logprobs, answer.behavior_logprobs)
        prox, mu = (torch.tensor(one.numpy()).double() for one in told if one is not None)
        advantages = torch.full_like(prox, float(ADVANTAGES[place]))
        sums.append(policy_losses(found, prox, mu, advantages, [len(prox)], by).losses_N)
    if by.reduce == "token":
        return torch.cat(sums).mean()
    if by.reduce == "constant":
        return torch.cat(sums).sum() / (len(sums) * by.constant_tokens)
    return torch.stack([one.mean() for one in sums]).mean()


def _losses(
    found: Tensor, call: CallCommitted, proximal: dict[int, object], by: LossSection
) -> Tensor:
    segment = call.segments[0]
    prox = torch.tensor(proximal[id(segment.token_ids)].numpy()).double()  # type: ignore[attr-defined]
    assert segment.behavior_logprobs is not None
    mu = torch.tensor(segment.behavior_logprobs.numpy()).double()
    advantages = torch.full_like(prox, float(ADVANTAGES[0]))
    return policy_losses(found, prox, mu, advantages, [len(prox)], by).losses_N


@pytest.mark.parametrize("budget", [12, 1000])
@pytest.mark.parametrize("reduce", ["token", "sequence", "constant"])
def test_a_sessions_loss_is_the_sum_over_its_paths(reduce: str, budget: int) -> None:
    """And its gradient; beside samples of one row, however it is cut."""
    random = np.random.default_rng(3)
    by = LossSection(reduce=reduce, **({"constant_tokens": 9} if reduce == "constant" else {}))
    of = session(random)
    first = sample_of(of, random)
    assert len(scored_rows(first)) == 3
    plain = [replace(s, trajectory=replace(s.trajectory, sample=n)) for n, s in
             enumerate(random_samples(2), start=1)]  # fmt: skip
    model = TinyModel().double()
    found = by_rows(model, [first, *plain], by, budget)
    slopes = torch.autograd.grad(found, list(model.parameters()))
    wanted = by_paths(model, of, plain, first, by)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for own, other in zip(
        slopes, torch.autograd.grad(wanted, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_masked_and_left_out_rows_are_none_of_the_loss() -> None:
    """Masks name segments of the sample, whichever row they are in; a sample is left out whole."""
    random = np.random.default_rng(4)
    first = sample_of(session(random), random)
    rows = scored_rows(first)
    whole = packed_within(rows, np.ones(3, np.float32), (), policy_version=0, token_budget=1000)
    assert whole.micro_batches[0].num_batch_learnt == whole.micro_batches[0].num_batch_samples == 1
    last = first.scores[-1].segment
    mask = MaskedSegment(group_id="0", sample=0, segment=last, staleness=9)
    less = packed_within(rows, np.ones(3, np.float32), (mask,), policy_version=0, token_budget=1000)
    gone = len(first.trajectory.segments[last].token_ids)
    assert less.num_loss_tokens == whole.num_loss_tokens - gone


def told(tokens: list[int]) -> np.ndarray:
    """Of each token a number that says all up to it."""
    return np.array([-(hash(tuple(tokens[: n + 1])) % 9973) / 100 for n in range(len(tokens))])


class TellsAll:
    """A scorer whose log-probs say what stood before a token."""

    def score(self, sequences: Sequence[TokenSequence], version: int, temperature: float) -> Any:
        found = [told(one.token_ids.tolist()).astype(np.float32) for one in sequences]
        return [Scores(logprobs=own, entropy=own) for own in found]


def test_each_answer_is_scored_behind_what_its_call_saw() -> None:
    """Once, whichever row it is in; beside a sample of one row."""
    random = np.random.default_rng(5)
    of = session(random)
    sample = sample_of(of, random).trajectory
    plain = random_samples(1)[0].trajectory
    anchors = {0: Anchor(label="sampled", policy_version=0)}
    scores, others = score_window([sample, plain], anchors, {}, cast(Any, TellsAll()))
    assert [one.segment for one in scores] == [
        n for n, segment in enumerate(sample.segments) if segment.author == "policy"
    ]
    found = sorted(tuple(one.proximal_logprobs.numpy().tolist()) for one in scores)
    wanted = []
    for node in of.nodes.values():
        saw = of.tokens_of(node.call.call_id).tolist()
        own = told(saw)[node.call.prompt_tokens :].astype(np.float32)
        wanted.append(tuple(own.tolist()))
    assert found == sorted(wanted)
    whole = [token for segment in plain.segments for token in segment.token_ids.numpy().tolist()]
    assert (
        others[0].proximal_logprobs.numpy().tolist() == told(whole).astype(np.float32)[2:].tolist()
    )
