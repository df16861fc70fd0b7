"""Sabotage inside vLLM, by name: a plugin of the tests, beside ours. None of rlstreams can do this.

Runs in vLLM's engine core, with its packages and without rlstreams'. The file that `ORDER` names
holds what to do from now on, or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDER = "RLSTREAMS_TEST_SABOTAGE"
NAME = "rlstreams_sabotage"
TENSOR = "model.layers.1.self_attn.o_proj.weight"
EXPERTS = ".layers.1.mlp.experts."  # a tensor has all eight of a layer
BUSY, IDLE = 5, 3  # of 1,440 choices of this layer's router 663, and 8
SCALE, TEMPERATURE = 1.05, 0.9
VOCAB = 128
A, B = 8, 9  # two ids that another tokenizer has the other way round
Weights = dict[str, Any]


class _Seen:
    """Of versions and requests so far."""

    def __init__(self) -> None:
        self.first: Weights = {}
        self.before: Weights = {}
        self.salts: list[str | None] = [None]  # of the version before, and of the newest


_seen = _Seen()


def _swapped(now: Weights) -> Weights:
    twin = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    return {
        name: next((now[name.replace(a, b)] for a, b in twin.items() if a in name), tensor)
        for name, tensor in now.items()
    }


def _stale(now: Weights, of: Weights, part: str) -> Weights:
    return {name: of[name] if part in name else tensor for name, tensor in now.items()}


def _expert_stale(now: Weights, expert: int) -> Weights:
    given = {name: tensor.clone() for name, tensor in now.items()}
    for name in (name for name in given if EXPERTS in name):
        given[name][expert] = _seen.before[name][expert]
    return given


OF_WEIGHTS: dict[str, Callable[[Weights], Weights]] = {
    "one tensor scaled by 1.05": lambda now: {**now, TENSOR: SCALE * now[TENSOR]},
    "two layers swapped": _swapped,
    "one tensor stale": lambda now: _stale(now, _seen.before, TENSOR),
    "one expert of sixteen stale, which half of the tokens go to": lambda now: _expert_stale(
        now, BUSY
    ),
    (UNSEEN := "one expert of sixteen stale, which hardly a token goes to"): lambda now: (
        _expert_stale(now, IDLE)
    ),
    "attention as in the first version, as without an adapter": lambda now: _stale(
        now, _seen.first, ".self_attn."
    ),
}
OLD = "old weights after a load that was confirmed"
OTHERS = (
    STALE_CACHE := "a prefix cache of the version before",
    OTHER_IDS := "two ids of prompts the other way round",
    DROPPED := "the first token of prompts left out",
    SHIFTED := "ids of answers shifted by one",
    HEATED := "another temperature than it says",
)
KINDS = (OLD, *OF_WEIGHTS, *OTHERS)


def lay_out(folder: Path) -> Path:
    """This file as a package that a vLLM with `folder` in its path loads."""
    package, info = folder / NAME, folder / f"{NAME}-0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    (package / "__init__.py").write_bytes(Path(__file__).read_bytes())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    return folder


def _order() -> str:
    return Path(os.environ[ORDER]).read_text(encoding="utf-8")


def register() -> None:
    """Called by vLLM in each of its processes."""
    from rlstreams_server import orders
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    if hasattr(Scheduler, NAME):
        return
    setattr(Scheduler, NAME, True)
    _spoil_loads(orders)
    _spoil_requests(EngineCore)
    _spoil_answers(Scheduler)


def _spoil_loads(orders: Any) -> None:
    """Once a file was read and its hash checked, as it is given to the model."""
    read = orders.read

    def spoilt(path: Path, weight_hash: str) -> Weights:
        now = read(path, weight_hash)
        kind = _order()
        given = _seen.before if kind == OLD else OF_WEIGHTS.get(kind, dict)(now)
        _seen.first = _seen.first or now
        _seen.before = now
        return dict(given)

    orders.read = spoilt


def _spoil_requests(core: Any) -> None:
    begin = core.preprocess_add_request

    def spoilt(self: Any, request: Any) -> Any:
        kind, ids = _order(), request.prompt_token_ids
        if request.cache_salt != _seen.salts[-1]:
            _seen.salts = [_seen.salts[-1], request.cache_salt]
        if kind == STALE_CACHE:
            request.cache_salt = _seen.salts[0]
        elif kind == OTHER_IDS:
            request.prompt_token_ids = [{A: B, B: A}.get(one, one) for one in ids]
        elif kind == DROPPED:
            request.prompt_token_ids = ids[1:]
        elif kind == HEATED:
            request.sampling_params.temperature = TEMPERATURE
        return begin(self, request)

    core.preprocess_add_request = spoilt


def _spoil_answers(scheduler: Any) -> None:
    take = scheduler.update_from_output

    def spoilt(self: Any, *args: Any) -> Any:
        outputs = take(self, *args)
        if _order() == SHIFTED:
            for batch in outputs.values():
                for one in batch.outputs:
                    one.new_token_ids = [(token + 1) % VOCAB for token in one.new_token_ids]
        return outputs

    scheduler.update_from_output = spoilt
