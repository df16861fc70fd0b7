"""Drawing of tokens independent of the batch: the draw at a position is a function of its key.

A counter-based generator (Philox, Salmon et al. 2011) gives the uniform number for (seed, sample
id, position) without any state, so a sample does not depend on the rest of its batch or on earlier
draws. Axes: `N` row, `V` vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


def uniforms(seed: int, sample_id: str, num: int) -> npt.NDArray[np.float64]:
    """The draws in [0, 1) of the first `num` positions of one sample."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    generator = np.random.Philox(
        counter=np.zeros(4, np.uint64), key=np.frombuffer(digest[:16], "<u8")
    )
    high_bits = generator.random_raw(num) >> np.uint64(11)
    return high_bits.astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Random number and sampling settings of each row of a batch."""

    uniform_N: torch.Tensor  # float64 in [0, 1)
    temperature_N: torch.Tensor  # float32; 0: the likeliest token
    top_p_N: torch.Tensor  # float32; 1: off
    top_k_N: torch.Tensor  # int64; 0: off


def sample(logits_NV: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (N,) int64 and their log-probs (N,) float32 in nats.

    Log-probs are of the distribution that was sampled from: after temperature, top-k and top-p.
    At temperature 0 the token is the argmax and the log-prob that of temperature 1.
    """
    greedy_N = draw.temperature_N == 0
    scale_N = torch.where(greedy_N, 1.0, draw.temperature_N)
    logprobs_NV = torch.log_softmax(logits_NV.float() / scale_N[:, None], -1)
    if bool(((draw.top_k_N > 0) | (draw.top_p_N < 1)).any()):
        logprobs_NV = _filtered(logprobs_NV, draw.top_k_N, draw.top_p_N)
    ids_N = torch.where(greedy_N, logprobs_NV.argmax(-1), _inverse_cdf(logprobs_NV, draw.uniform_N))
    return ids_N, logprobs_NV.gather(-1, ids_N[:, None])[:, 0]


def _inverse_cdf(logprobs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw; float64 throughout."""
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    total_N = cumulative_NV[:, -1]
    # Just below the total, so that rounding never asks for a token behind the last possible one.
    below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    target_N = torch.minimum(uniform_N * total_N, below_N)
    return (cumulative_NV <= target_N[:, None]).sum(-1)


def _filtered(
    logprobs_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor
) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens, and among them the fewest that hold `top_p`; renormalise.

    Among equally likely tokens the lower id is kept.
    """
    num_tokens = logprobs_NV.shape[-1]
    sorted_NV, order_NV = logprobs_NV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(num_tokens, device=logprobs_NV.device)
    limit_N = torch.where(top_k_N > 0, top_k_N, num_tokens)
    sorted_NV = sorted_NV.masked_fill(rank_V >= limit_N[:, None], -torch.inf)
    probs_NV = torch.softmax(sorted_NV.double(), -1)
    before_NV = probs_NV.cumsum(-1) - probs_NV
    # The likeliest token always stays: nothing comes before it.
    dropped_NV = (before_NV >= top_p_N[:, None]) & (top_p_N[:, None] < 1)
    sorted_NV = sorted_NV.masked_fill(dropped_NV, -torch.inf)
    kept_NV = torch.full_like(logprobs_NV, -torch.inf).scatter(-1, order_NV, sorted_NV)
    return torch.log_softmax(kept_NV, -1)
