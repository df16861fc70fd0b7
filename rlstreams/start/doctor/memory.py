"""What a run will hold in memory, by role, estimated before anything is loaded.

The items are those that a role keeps at its fullest moment; `infra/docs/models.md` compares them
with what processes took. Sizes in MB (1e6 bytes).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlstreams.start.doctor.check import Check, fail, ok, warn
from rlstreams.start.doctor.host import Host
from rlstreams.start.doctor.model import FLOAT32, SIZES, ModelFolder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.model.base import LOGITS_BYTES

PROCESS_MB = 450.0  # a role with torch and transformers, before it has a model
SMALL_PROCESS_MB = 120.0  # one without
BROKER_MB = 150.0  # of the broker, beside its heap
# Arrays of tokens x vocabulary in float32 that are alive together; trainer and logprob compute as
# many rows at a time as fit LOGITS_BYTES.
SAMPLING_ARRAYS = 6.0  # logits, log-probs, and probabilities in float64 with their sums
SCORING_ARRAYS = 4.0  # logits, scaled, log-probs, probabilities
TRAINING_ARRAYS = 5.0  # logits, scaled, log-probs and gradients
# What backward needs of a layer's forward, in widths: of the hidden state, and of the MLP.
HIDDEN_ACTIVATIONS, MLP_ACTIVATIONS = 10.0, 4.0

PROMPT_TOKENS = 512  # a guess: they are not counted

CPU = "cpu"
LOADED = "weights while they are loaded"  # read here, then moved to the GPU
LESS = "fewer rollout.slots, a smaller logprob.token_budget or trainer.micro_batch_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """What one process of a role holds, by item."""

    role: str
    processes: int
    items: Mapping[str, float]  # MB of this machine's memory
    on_gpu: Mapping[str, float] = field(default_factory=dict)  # MB of its GPU's

    @property
    def total_mb(self) -> float:
        """Of all its processes, without what is on GPUs."""
        return self.processes * sum(self.items.values())


def estimate(model: ModelFolder, config: RunConfig) -> list[RoleMemory]:
    """Every role of the run; the broker too, if it is ours. Model servers are not of the run."""
    logits = int(model.config.get("vocab_size") or 0) * FLOAT32 / 1e6  # of one token
    roles = [
        RoleMemory(role="prompts", processes=1, items={"process": SMALL_PROCESS_MB}),
        _sampling(model, config, logits),
        _scoring(model, config, logits),
        *_training(model, config, logits),
    ]
    if not config.broker.bootstrap:
        heap = {"heap": float(config.broker.heap_mb), "process": BROKER_MB}
        roles.insert(0, RoleMemory(role="broker", processes=1, items=heap))
    return roles


def of_host(roles: Sequence[RoleMemory], host: Host) -> list[RoleMemory]:
    """Those of `estimate` that run here; of a role by itself one worker, the trainer with ranks."""
    if not host.is_alone:
        return list(roles)
    here = {host.role, "ranks"} if host.role == "trainer" else {host.role}
    return [
        role if role.role == "ranks" else replace(role, processes=1)
        for role in roles
        if role.role in here
    ]


def _sampling(model: ModelFolder, config: RunConfig, logits_mb: float) -> RoleMemory:
    """The rollout role; beside a model server it holds at most a version that it hands on."""
    rollout, weights = config.rollout, model.mb_in(config.model.dtype)
    if rollout.engine != "builtin":
        by_folder = {"a version handed on": weights} if config.weights.channel == "file" else {}
        items = {"process": PROCESS_MB, **by_folder}
        return RoleMemory(role="rollout", processes=rollout.workers, items=items)
    computing = {
        "weights": weights,
        "a version being pulled": weights,
        "KV cache": cache_mb(model, config),
        "logits": SAMPLING_ARRAYS * rollout.slots * logits_mb,
    }
    return _placed("rollout", rollout.workers, rollout.device, computing, {LOADED: weights})


def _scoring(model: ModelFolder, config: RunConfig, logits_mb: float) -> RoleMemory:
    logprob, weights = config.logprob, model.mb_in(config.model.dtype)
    tokens = max(logprob.token_budget, longest_sample(model, config))
    computing = {
        "versions held": logprob.versions_held * weights,
        "a version being pulled": weights,
        **({"reference": weights} if config.trainer.loss.kl_coef else {}),
        "logits": SCORING_ARRAYS * _at_a_time(tokens * logits_mb),
    }
    return _placed("logprob", logprob.workers, logprob.device, computing, {LOADED: weights})


def _training(model: ModelFolder, config: RunConfig, logits_mb: float) -> list[RoleMemory]:
    """The trainer; with several ranks the others too, which neither serve nor read."""
    trainer, weights = config.trainer, model.mb_in(config.model.dtype)
    # A sample above the budget is a micro-batch of its own.
    tokens = max(trainer.micro_batch_tokens, longest_sample(model, config))
    learning = _learning(model, config).items()
    of_rank = {
        "weights": weights,  # loaded whole, also where they are cut then
        **{item: size / trainer.ranks for item, size in learning},
        "logits": TRAINING_ARRAYS * _at_a_time(tokens * logits_mb),
        "activations": tokens * _activation_mb(model.config, config),
    }
    served = {"versions served": _copies_served(config) * weights}
    samples = {"samples": 0.1 * trainer.buffer_mb}
    passing = {"a checkpoint": _checkpoint_mb(model, config), **samples}
    if trainer.device == CPU:
        of_first = {**of_rank, **served, **samples}
    elif trainer.ranks > 1 or config.weights.snapshot == "pinned":
        of_first, passing = of_rank, {**served, **passing}
    else:
        of_first = {**of_rank, **served}
    roles = [_placed("trainer", 1, trainer.device, of_first, passing)]
    if trainer.ranks > 1:
        others = trainer.ranks - 1
        roles.append(_placed("ranks", others, trainer.device, of_rank, {LOADED: weights}))
    return roles


def _placed(
    role: str,
    processes: int,
    device: str,
    computing: Mapping[str, float],
    passing: Mapping[str, float],
) -> RoleMemory:
    """A process that computes on this device.

    Args:
        computing: what lies where it computes.
        passing: what lies in this machine's memory if that is a GPU.
    """
    process = {"process": PROCESS_MB}
    if device == CPU:
        return RoleMemory(role=role, processes=processes, items={**process, **computing})
    items = {**process, **passing}
    return RoleMemory(role=role, processes=processes, items=items, on_gpu=computing)


def _copies_served(config: RunConfig) -> int:
    """Copies of the weights that the trainer holds for pullers; files are not in memory."""
    weights = config.weights
    is_copied = weights.channel != "file" and weights.snapshot != "none"
    return weights.versions_served if is_copied else 0


def _at_a_time(logits_mb: float) -> float:
    return min(logits_mb, LOGITS_BYTES / 1e6)


def _learning(model: ModelFolder, config: RunConfig) -> dict[str, float]:
    """Beside the weights: gradients and moments of all, or the copy with adapters merged.

    All in float32; of weights in 16 bits their lower halves too.
    """
    own_mb, whole_mb = model.mb_in(config.model.dtype), model.weights_mb
    if config.trainer.lora.rank:
        return {"merged weights": own_mb}
    halves = {"lower halves": whole_mb - own_mb} if own_mb < whole_mb else {}
    return {"gradients and moments": 3 * whole_mb, **halves}


def _checkpoint_mb(model: ModelFolder, config: RunConfig) -> float:
    """Read whole before it goes to a GPU: weights and moments; of adapters the weights count."""
    if config.trainer.lora.rank:
        return model.mb_in(config.model.dtype)
    return 3 * model.weights_mb  # of 16 bits with their lower halves


def cache_mb(model: ModelFolder, config: RunConfig) -> float:
    """Keys and values of all slots: room for twice the longest sequence, as the cache doubles."""
    per_token = cache_bytes_per_token(model.config, config)
    return config.rollout.slots * 2 * longest_sample(model, config) * per_token / 1e6


def longest_sample(model: ModelFolder, config: RunConfig) -> float:
    """Tokens of a sample that has all its turns, up to the model's longest sequence."""
    # Before each turn stands as much again as a prompt: that, or the environment's answer.
    longest = config.num_turns * (config.rollout.max_new_tokens + PROMPT_TOKENS)
    return min(model.longest or math.inf, longest)


def cache_bytes_per_token(text: Mapping[str, Any], config: RunConfig) -> float:
    """Keys and values of one token in all layers, bytes."""
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    key_heads = int(text.get("num_key_value_heads") or heads)
    width = int(text.get("head_dim") or _hidden_size(text) // heads)
    return 2.0 * _num_layers(text) * key_heads * width * SIZES[config.model.dtype]


def memory_check(roles: Sequence[RoleMemory], free_mb: float) -> Check:
    """Whether all roles fit together; names the first that does not fit even alone."""
    total_mb = sum(role.total_mb for role in roles)
    found = f"about {total_mb:,.0f} MB of {free_mb:,.0f} MB free"
    if alone := next((role for role in roles if role.total_mb > free_mb), None):
        item, size = max(alone.items.items(), key=lambda pair: pair[1])
        return fail(
            "memory",
            f"{found}: {alone.role} alone takes {alone.total_mb:,.0f} MB, "
            f"most of it for {item} ({size:,.0f} MB)",
            f"{'' if alone.on_gpu else f'{LESS}; or '}a smaller model, or more memory",
        )
    if total_mb > free_mb:
        return warn("memory", found, f"{LESS}; fewer workers; or a smaller model")
    return ok("memory", found)


def table(roles: Sequence[RoleMemory], free_mb: float) -> list[str]:
    """Lines for people: a row a role, what it is made of, and the sum against what is free."""
    lines = [f"{'memory by role':<16} {'MB':>9}"]
    for role in roles:
        name = role.role if role.processes == 1 else f"{role.processes} x {role.role}"
        lines.append(f"  {name:<14} {role.total_mb:>9,.0f}  {_listed(role.items)}")
        if role.on_gpu:
            lines.append(
                f"{'':<28}on its GPU {sum(role.on_gpu.values()):,.0f}: {_listed(role.on_gpu)}"
            )
    total_mb = sum(role.total_mb for role in roles)
    verdict = "fits" if total_mb <= free_mb else "does not fit"
    lines.append(f"  {'all':<14} {total_mb:>9,.0f}  {verdict}: {free_mb:,.0f} MB are free")
    return lines


def _listed(items: Mapping[str, float]) -> str:
    return ", ".join(f"{item} {size:,.0f}" for item, size in items.items() if size >= 0.5)


def free_mb() -> float:
    """Memory that can be had without swapping; the whole of it where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / 1e6
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6


def _activation_mb(text: Mapping[str, Any], config: RunConfig) -> float:
    """What the backward pass needs of one token's forward, MB."""
    widths = HIDDEN_ACTIVATIONS * _hidden_size(text) + MLP_ACTIVATIONS * _mlp_width(text)
    widths *= _num_layers(text)
    if config.trainer.activation_checkpointing:  # each layer's input, and one layer whole
        widths = widths / max(_num_layers(text), 1) + _num_layers(text) * _hidden_size(text)
    return widths * SIZES[config.model.dtype] / 1e6


def _mlp_width(text: Mapping[str, Any]) -> int:
    """Of a layer as one token passes it: of all experts only those that it is routed to."""
    routed = int(text.get("moe_intermediate_size") or 0) * int(text.get("num_experts_per_tok") or 0)
    return routed or int(text.get("intermediate_size") or 4 * _hidden_size(text))


def _hidden_size(text: Mapping[str, Any]) -> int:
    return int(text.get("hidden_size") or text.get("n_embd") or text.get("d_model") or 0)


def _num_layers(text: Mapping[str, Any]) -> int:
    return int(text.get("num_hidden_layers") or text.get("n_layer") or text.get("n_layers") or 0)
