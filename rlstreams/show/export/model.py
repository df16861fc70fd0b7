"""A checkpoint as a Hugging Face folder: what other programs load, checked by loading it.

Weights travel and are kept under the names of the loaded model, experts fused. The library's own
`save_pretrained` turns them back into the names and shapes of the folder that training began with,
so whatever served that folder serves this one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.digests import file_sha256
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.synced import sync
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.model import load_model, load_weights, weights_of
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest, objection
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import size_bytes, weight_hash
from rlstreams.workers.weights.link.target import dtype_name

DTYPES = ("float32", "bfloat16", "float16")
FACTS_FILE = "rlstreams.json"
# Beside weights and configuration: tokenizer, chat template, processors, licences.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported model; `rlstreams.json` in its folder has the same facts."""

    run: str
    checkpoint: str
    step: int
    policy_version: int
    dtype: str
    ledger_hash: str  # of the version, as the log has it
    weight_hash: str  # of what was read back: the same one unless the dtype was changed
    num_bytes: int  # of all tensors


def export_model(
    bus: Bus, run_folder: Path, model: Path, to: Path, *, step: int = 0, dtype: str = ""
) -> Exported:
    """Write the model of a checkpoint; the folder has its name only once it was checked.

    Takes memory for the model twice.

    Args:
        model: the folder that the run began with, for configuration, tokenizer and names.
        to: a folder that is not there yet, or is empty.
        step: of the checkpoint; 0: the newest one.
        dtype: of `DTYPES`; empty: as the checkpoint has it.

    Raises:
        ConfigError: nothing to export, no such checkpoint, another model folder, no room, or
            something is in the way.
        WeightError: what was written does not load as what the log says.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--out {to} is there and not empty; name a new folder")
    ledger = read_ledger(bus, "export-model")
    if ledger.claim is None:
        raise ConfigError(f"no trainer ever claimed the run in {run_folder}: nothing was trained")
    store = CheckpointStore(run_folder / "checkpoints")
    manifest = chosen(store, ledger.claim.run, ledger, step)
    weights = _weights(store, manifest)
    had = _dtype_of(weights)
    dtype = dtype or had
    loaded = _source(model, had, ledger.claim)
    if dtype != had:
        loaded = _loaded(model, dtype)
    expected = {name: weights[name].to(own.dtype) for name, own in weights_of(loaded).items()}
    load_weights(loaded, expected)
    facts = Exported(
        run=manifest.run,
        checkpoint=manifest.name,
        step=manifest.step,
        policy_version=manifest.policy_version,
        dtype=dtype,
        ledger_hash=manifest.weight_hash,
        weight_hash=weight_hash(expected),
        num_bytes=size_bytes(expected),
    )
    del weights, expected
    _write(loaded, model, to, facts)
    return facts


def chosen(store: CheckpointStore, run: str, ledger: Ledger, step: int) -> Manifest:
    """The newest whole checkpoint that the ledger confirms; with `step` the one of that step.

    Raises ConfigError: there is none; names the steps that have one, and what is wrong with others.
    """

    def against(manifest: Manifest) -> str:
        if step and manifest.step != step:
            return _ELSEWHERE
        return objection(run, ledger, manifest)

    found = store.newest(against)
    if found.manifest is not None:
        return found.manifest
    wrong = [p for p in found.passed_over if p.reason != _ELSEWHERE]
    others = sorted({m.step for m in store.manifests() if not objection(run, ledger, m)} - {step})
    lines = [f"run {run} has no checkpoint" + (f" of step {step}" if step else "") + " to export"]
    lines += [f"{passed.checkpoint}: {passed.reason}" for passed in wrong]
    if others:
        lines.append(f"there is one of step {', '.join(map(str, others))}: leave --step out")
    else:
        lines.append("one is written every trainer.checkpoint_every steps and at every drain")
    raise ConfigError("; ".join(lines))


_ELSEWHERE = "of another step"


def _weights(store: CheckpointStore, manifest: Manifest) -> Mapping[str, Tensor]:
    weights = store.load_weights(manifest)
    if (actual := weight_hash(weights)) != manifest.weight_hash:
        raise ConfigError(
            f"checkpoint {manifest.name}: its weights have hash {actual[:12]}, the log says "
            f"{manifest.weight_hash[:12]}; export another with --step"
        )
    return weights


def _dtype_of(weights: Mapping[str, Tensor]) -> str:
    """Floating-point dtype of most elements."""
    sizes: dict[str, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            name = dtype_name(tensor.dtype)
            sizes[name] = sizes.get(name, 0) + tensor.numel()
    return max(sizes, key=lambda name: sizes[name])


def _source(model: Path, dtype: str, claim: TrainerStarted) -> torch.nn.Module:
    """Load the folder that the run began with; refuse another one, by its hashes."""
    loaded = _loaded(model, dtype)
    tokenizer = model / "tokenizer.json"
    actual = {"model": weight_hash(weights_of(loaded))}
    if tokenizer.is_file():
        actual["tokenizer"] = file_sha256(tokenizer)
    for name, found in actual.items():
        began = claim.hashes.get(name, found)
        if found != began:
            raise ConfigError(
                f"model folder {model}: its {name} has hash {found[:12]}, the run began with "
                f"{began[:12]}; name the folder that it began with: --model DIR"
            )
    return loaded


def _loaded(model: Path, dtype: str) -> torch.nn.Module:
    try:
        return load_model(model, dtype)
    except EngineError as err:
        raise ConfigError(f"{err}; if it has moved, name it: --model DIR") from err


def _write(loaded: Any, model: Path, to: Path, facts: Exported) -> None:  # noqa: ANN401
    """Write the folder beside `to`, read it back, then rename it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(to.parent).free
    if free < facts.num_bytes:
        raise ConfigError(
            f"--out {to}: the model has {facts.num_bytes:,} bytes and {free:,} are free there"
        )
    temporary = to.with_name(f".tmp-{to.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        loaded.save_pretrained(temporary)
        for path in temporary.iterdir():  # the library keeps weights from all but their owner
            shutil.copymode(temporary / "config.json", path)
        _copy_rest(model, temporary)
        text = json.dumps(asdict(facts), indent=2)
        (temporary / FACTS_FILE).write_text(text + "\n", encoding="utf-8")
        del loaded
        _check(temporary, facts)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.replace(temporary, to)  # an empty folder may be there
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_rest(model: Path, to: Path) -> None:
    for pattern in _COPIED:
        for path in model.glob(pattern):
            if path.is_file() and path.name not in _WEIGHTS and not (to / path.name).exists():
                shutil.copyfile(path, to / path.name)


def _check(folder: Path, facts: Exported) -> None:
    actual = weight_hash(weights_of(load_model(folder, facts.dtype)))
    if actual != facts.weight_hash:
        raise WeightError(
            f"what was written loads as weights {actual[:12]}, and not as {facts.weight_hash[:12]} "
            f"of step {facts.step}: this model's own library does not write what it reads; "
            "nothing was kept"
        )
