"""The formula that a step minimises, with every setting put in, and a recorded step's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.show.metrics.figures import denoised
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted
from rlstreams.workers.config.loss import RATIO_MAX
from rlstreams.workers.config.user_code import Option, docstring_of, located, source_texts
from rlstreams.workers.loop.agreement import code_digests

if TYPE_CHECKING:
    from rlstreams.schemas.events import StepCompleted
    from rlstreams.streams.log.bus import Bus
    from rlstreams.workers.config.loss import LossSection
    from rlstreams.workers.config.trainer import TrainerSection
    from rlstreams.workers.trainer.intake.payloads import Payload

NUM_TOKENS = 8  # of a sample, in the table
FIGURES = (
    "ratio_max", "clip_fraction", "weight_mean", "rejected_fraction", "ess", "kl", "kl_reference",
    "entropy", "value_loss", "value_clip_fraction", "explained_variance", "grad_norm",
    "lr", "updates",
)  # fmt: skip


def formula(trainer: TrainerSection, code: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the loss of a step. pi, prox, mu, ref: log-probs of a token; r: a sample's reward.

    Args:
        code: source of the user's functions that train, of a claim; None: of the files as they are.

    Raises:
        ConfigError: a function of the user's is not there.
    """
    by, adam = trainer.loss, trainer.optimizer
    stale = "masked" if trainer.on_stale == "mask" else "its group is dropped"
    yield f"advantage   A = {_advantage(by)}"
    yield f"proximal    prox: {_PROXIMAL[by.proximal]}"
    most = counted(trainer.max_staleness, "version")
    yield f"staleness   at most {most}; a segment beyond is {stale}"
    yield f"weight      w = {_weight(by)}"
    yield from (f"            {line}" for line in _rejections(by))
    yield f"loss        {_loss(by)}"
    if by.kl_coef:
        kl = "exp(d) - 1 - d" if by.kl_estimator == "k3" else "d^2 / 2"
        weighed = f"w min(rho, {RATIO_MAX:g}) " if by.kl_weight == "ratio" else ""
        yield f"            + {by.kl_coef:g} {weighed}min({kl}, 10), d = ref - pi"
    if by.entropy_coef:
        yield f"            - {by.entropy_coef:g} entropy"
    if by.advantage == "gae":
        losses, bound = "(V - R)^2", ""
        if by.value_clip:
            losses = "max((V - R)^2, (V' - R)^2)"
            bound = f", V' = V, at most {by.value_clip:g} from V0"
        yield f"            + {by.value_coef:g} {losses} / 2{bound}; V0 of the start, R = GAE + V0"
        if by.value_warmup_steps:
            yield f"            in the first {by.value_warmup_steps} steps V alone learns"
    yield f"reduced     {_reduced(by)}"
    batch = f"{trainer.groups_per_step} groups"
    if trainer.minibatches > 1:
        batch += f" in {trainer.minibatches} mini-batches"
    if trainer.batch_epochs > 1:
        batch += f", {trainer.batch_epochs} times"
    updates = trainer.minibatches * trainer.batch_epochs
    yield f"batch       {batch}: {updates} update{'s' * (updates > 1)} a step"
    falls = f", then {adam.schedule} to {adam.lr_end:g} at step {adam.decay_steps}"
    rate = f"{adam.lr:g} after {adam.warmup_steps} steps of warm-up"
    rate += falls if adam.schedule != "constant" else ", then constant"
    name = "own" if adam.is_own else "AdamW"
    yield f"{name:<12}learning rate {rate}; gradient norm at most {adam.max_grad_norm:g}"
    for field, name, options in trainer.own():
        texts = source_texts(field, name) if code is None else code
        yield from _function(field, name, options, texts)


def _function(
    field: str, name: str, options: Mapping[str, Option], code: Mapping[str, str]
) -> Iterator[str]:
    """A function of the user's: file, first line of its docstring, options, hashes.

    Raises ConfigError: it is not in its file.
    """
    file, module, function = located(name) or ("", "", name)
    start = f"{field}: "
    own = {key.removeprefix(start): text for key, text in code.items() if key.startswith(start)}
    path = Path(file).name if file else module.replace(".", "/")
    entry = next((p for p in (path, f"{path}.py", f"{path}/__init__.py") if p in own), "")
    said = docstring_of(own.get(entry, ""), function)
    if said is None and file:
        raise ConfigError(f"{field}: {file} has no function {function!r}")
    yield ""
    yield f"{field}: {function} of {file or module}{f': {said}' if said else ''}"
    yield f"  options {', '.join(f'{k} = {v!r}' for k, v in options.items()) or 'none'}"
    for key, digest in code_digests(own).items():
        yield f"  SHA-256 {digest[:12]}  {key}"


def numbers(bus: Bus, step: int) -> Iterator[str]:
    """A recorded step's formula, its first group, tokens of a sample, and the step's figures.

    Raises ConfigError: there is no such step.
    """
    from rlstreams.workers.loop.claims import claimed_config
    from rlstreams.workers.trainer.claim import read_ledger
    from rlstreams.workers.trainer.redo.redo import read_step

    ledger = read_ledger(bus, "explain")
    if step not in ledger.steps:
        raise ConfigError(f"there is no step {step}: the log has steps up to {ledger.last_step}")
    fact = ledger.steps[step]
    claim = ledger.claims[fact.epoch]
    trainer = claimed_config(claim).trainer
    event, payloads = read_step(bus, fact, lambda _: None)
    yield from formula(trainer, claim.code)
    yield ""
    first = event.samples[0].group_id
    own = [
        (ref, p) for ref, p in zip(event.samples, payloads, strict=True) if ref.group_id == first
    ]
    yield f"step {step}, group {first}: " + ", ".join(
        f"r {ref.reward:g} -> A {ref.advantage:.4g}" for ref, _ in own
    )
    shown = max(own, key=lambda pair: abs(pair[0].advantage))
    yield from _tokens(shown[1], trainer.loss)
    yield f"loss {denoised('loss', event.loss):.6g}; " + _figures(event)


def _tokens(payload: Payload, by: LossSection) -> Iterator[str]:
    """The weights of the first tokens of a sample; the policy of that step is not in the log."""
    import numpy as np

    from rlstreams.workers.trainer.learn.correction import sample_weights

    scored = payload.scored
    parts = [(scored.trajectory.segments[s.segment], s.proximal_logprobs) for s in scored.scores]
    mu = np.concatenate([p.behavior_logprobs.numpy() for p, _ in parts if p.behavior_logprobs])
    prox = np.concatenate([logprobs.numpy() for _, logprobs in parts])
    name = f"sample {scored.trajectory.sample}"
    if by.proximal in ("step_start", "interpolated"):
        yield f"{name}: prox is known only while the step is done: `rlstreams replay step`"
        return
    prox = mu if by.proximal == "behavior" else prox
    weights = sample_weights(prox, mu, by)
    yield f"{name}, its first tokens: mu -> prox: w (before what a batch decides)"
    for one, other, weight in list(zip(mu, prox, weights, strict=True))[:NUM_TOKENS]:
        yield f"  {one:9.4f} -> {other:9.4f}: {weight:.4f}"


def _figures(event: StepCompleted) -> str:
    found = {name: denoised(name, event.metrics[name]) for name in FIGURES if name in event.metrics}
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())


_PROXIMAL = {
    "sampled": "under the version that sampled, scored again",
    "behavior": "mu, the sampler's own: w is 1",
    "step_start": "under the weights before the step's first update",
    "interpolated": "under the sampling version, a versions old, + (a - 1)/a (pi - it)",
}


def _advantage(by: LossSection) -> str:
    from rlstreams.workers.config.loss import WITHOUT_GROUPS

    text = f"{_short(by.advantage)}(samples)" if by.has_own_advantage else _ours(by)
    if by.reward_min:
        text += f"; 0 where r < {by.reward_min:g}"
    if by.advantage not in WITHOUT_GROUPS and not by.has_own_advantage:
        text += f"; without siblings {'r' if by.lone == 'reward' else '0'}"
    if by.overlong_tokens:
        start = by.overlong_tokens - by.overlong_buffer_tokens
        text += f"; r less up to {by.overlong_factor:g} for {start} to {by.overlong_tokens} tokens"
    return text


def _ours(by: LossSection) -> str:
    return {
        "grpo": "(r - mean) / (std + 1e-6) of the group"
        if by.normalize_std
        else "r - mean of the group",
        "rloo": "r - mean of the siblings",
        "reinforce++": "(r - mean) / (std + 1e-6) of the batch",
        "reinforce++baseline": "(a - mean) / (std + 1e-6) of the batch, a = r - mean of the group",
        "maxrl": "(r - mean) / mean of the group",
        "gae": f"GAE of r at the last token, gamma {by.gae_gamma:g}, lambda {by.gae_lambda:g}"
        + (", standardized over the batch's tokens" if by.normalize_std else ""),
        "reward": "r",
        "one": "1",
    }[by.advantage]


def _short(name: str) -> str:
    """The function's name, of `file.py:name` or `module:name`."""
    return name.rpartition(":")[2]


def _weight(by: LossSection) -> str:
    if by.correction == "none":
        text = "1"
    else:
        ratio = {
            "token": "exp(prox - mu)",
            "sequence": "exp(sum of prox - mu over the sample)",
            "geometric": "exp(mean of prox - mu over the sample)",
        }[by.correction_level]
        text = f"min({ratio}, {by.weight_cap:g})"
        if by.correction == "mask":
            text = f"{ratio}, 0 outside of {by.weight_floor:g} to {by.weight_cap:g}"
    return f"({text}) / its mean over the batch" if by.weight_normalize else text


def _rejections(by: LossSection) -> Iterator[str]:
    if by.veto_low or by.veto_high:
        high = f"{by.veto_high:g}" if by.veto_high else "any"
        yield f"0 for a sample of which a token's exp(prox - mu) is not {by.veto_low:g} to {high}"
    if by.rejection != "none":
        level = by.rejection_level.replace("sequence_", "the sample's ").replace(
            "token", "a token's"
        )
        low = f"below {by.rejection_low:g} or " if by.rejection_low else ""
        yield f"0 where {level} {by.rejection} of prox - mu is {low}above {by.rejection_high:g}"
    if by.off_policy_max:
        yield f"0 for a sample with A < 0 and a mean of mu - pi above {by.off_policy_max:g}"
    if by.kind == "m2po":
        yield f"0 for tokens of largest (pi - mu)^2: mean of the others {by.second_moment_max:g}"
    if by.entropy_share < 1:
        yield f"0 but for the {by.entropy_share:.0%} of the batch's tokens of highest entropy"


def _loss(by: LossSection) -> str:
    low, high = f"{1 - by.clip_low:g}", f"{1 + by.clip_high:g}"
    most = f"{RATIO_MAX:g}"
    if by.has_own_kind:
        return f"{_short(by.kind)}(pi, prox, mu, A, w, ...) of each token"
    dual = f", at most -w {by.clip_dual:g} A where A < 0" if by.clip_dual else ""
    return {
        "ppo": f"-w min(rho A, clip(rho, {low}, {high}) A){dual}; rho = exp(pi - prox)",
        "gspo": f"-w min(s A, clip(s, {low}, {high}) A); s = exp(the sample's mean of pi - prox)",
        "cispo": f"-w min(rho, {high}) A pi, no gradient through rho = exp(pi - prox)",
        "sapo": f"-w 4/t sigmoid(t (rho - 1)) A; rho = exp(pi - prox), t = {by.tau_positive:g} "
        f"where A > 0, else {by.tau_negative:g}",
        "dppo": f"-w min(rho, {most}) A, 0 where rho moves off with A and {by.divergence} > "
        f"{by.divergence_max:g}; rho = exp(pi - prox)",
        "m2po": f"-w min(rho, {most}) A; rho = exp(pi - prox)",
        "sft": "-w A pi",
        "distill": f"w A {_divergence(by)}"
        if by.distill_top_k
        else f"-w min(rho, {most}) A (ref - pi), no gradient through the difference; "
        "rho = exp(pi - prox), ref the teacher's",
    }[by.kind]


def _divergence(by: LossSection) -> str:
    beta = by.distill_beta
    text = {1.0: "KL(student || teacher)", 0.0: "KL(teacher || student)"}.get(
        beta,
        f"({beta:g} KL(teacher || m) + {1 - beta:g} KL(student || m)), "
        f"m = {beta:g} teacher + {1 - beta:g} student",
    )
    return f"{text}, over the teacher's {by.distill_top_k} likeliest tokens and all others as one"


def _reduced(by: LossSection) -> str:
    return {
        "token": "mean over all tokens",
        "sequence": "mean over samples of their means",
        "constant": f"mean over samples of their sums / {by.constant_tokens}",
    }[by.reduce]
