"""Whether a model folder can be loaded, told from its small files and its tensors' headers.

Neither torch nor the weights are read: a safetensors file begins with the length of its header
(8 bytes, little-endian) and the header, JSON: each tensor's dtype, shape and place. Source: the
format's description at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streams.errors import ConfigError
from workers.config import RunConfig
from workers.doctor.check import Check, ok, warn
from workers.tokenizer import Tokenizer, TokenizerError

FLOAT32 = 4  # bytes; what the built-in engine, scorer and trainer compute in
PROCESS_MB = 500  # a Python process with torch
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder that can be loaded, as far as its headers tell."""

    path: Path
    kind: str  # `model_type`
    config: Mapping[str, Any]
    num_parameters: int
    tokenizer: Tokenizer

    @property
    def weights_mb(self) -> float:
        """In float32."""
        return self.num_parameters * FLOAT32 / 1e6

    @property
    def longest(self) -> int | None:
        """`max_position_embeddings`; None if the folder does not say."""
        return int(self.config.get("max_position_embeddings") or 0) or None


def read_model(path: str) -> ModelFolder:
    """Read what is small, check that it fits together.

    Raises:
        ConfigError: names file and field, and what was found.
    """
    if not path:
        raise ConfigError("model.path is empty; name a Hugging Face folder")
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: there is no folder {path!r}")
    fields = _config(folder / "config.json")
    _check_class(folder, fields)
    shapes = {
        name: shape for file in _weight_files(folder) for name, shape in tensor_shapes(file).items()
    }
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as err:
        raise ConfigError(f"model.path: {err}") from err
    text = {**fields, **(fields.get("text_config") or {})}
    _check_vocabulary(folder, text, shapes, tokenizer)
    return ModelFolder(
        path=folder,
        kind=str(fields["model_type"]),
        config=text,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        tokenizer=tokenizer,
    )


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file, from its header.

    Raises:
        ConfigError: not such a file, or cut short.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"model.path: {file} ({size} bytes) is no safetensors file")
            header = json.loads(opened.read(length))
    except OSError as err:
        raise ConfigError(f"model.path: cannot read {file}: {err.strerror}") from err
    except ValueError as err:
        raise ConfigError(f"model.path: {file}: its header is not JSON: {err}") from err
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if end != size:
        raise ConfigError(
            f"model.path: {file} has {size} bytes, its header promises {end}: "
            "the file is damaged; copy or download it again"
        )
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}


def model_check(model: ModelFolder) -> Check:
    """What the model is."""
    return ok(
        "model",
        f"{model.path}: {model.kind}, {_amount(model.num_parameters)} parameters, vocabulary "
        f"{model.config.get('vocab_size')} (tokenizer {model.tokenizer.vocab_size}), "
        f"at most {model.longest or 'any number of'} tokens",
    )


def memory_check(model: ModelFolder, config: RunConfig) -> Check:
    """What every role will hold, against what is free."""
    roles = memory_mb(model, config)
    total_mb, free_mb = sum(roles.values()), _free_mb()
    listed = ", ".join(f"{role} {size:,.0f}" for role, size in roles.items())
    found = f"about {total_mb:,.0f} MB of {free_mb:,.0f} MB free: {listed}"
    if total_mb > free_mb:
        return warn(
            "memory", found, "lower rollout.slots, logprob.token_budget, "
            "trainer.micro_batch_tokens or workers; or take a smaller model",
        )  # fmt: skip
    return ok("memory", found)


def memory_mb(model: ModelFolder, config: RunConfig) -> dict[str, float]:
    """Estimate by role, MB; all workers of a role together.

    Rollout: weights, another version while it is pulled, and the KV cache of all slots. Logprob:
    the versions held, logits of a window. Trainer: weights, gradient, two moments, the versions
    that it serves while it writes one, logits and their gradient, the buffer it may fill.
    """
    text, weights = model.config, model.weights_mb
    vocabulary = int(text.get("vocab_size") or 0)
    per_logits = vocabulary * FLOAT32 / 1e6  # of one token
    positions = min(model.longest or math.inf, 2 * config.rollout.max_new_tokens + 512)
    cache = config.rollout.slots * positions * _cache_bytes_per_token(text) / 1e6
    held = (config.logprob.versions_held + 1) * weights
    return {
        "broker": 0.0 if config.broker.bootstrap else config.broker.heap_mb + 100.0,
        "prompts": PROCESS_MB / 4,
        "rollout": config.rollout.workers * (PROCESS_MB + 2 * weights + cache),
        "logprob": config.logprob.workers
        * (PROCESS_MB + held + config.logprob.token_budget * per_logits),
        "trainer": PROCESS_MB
        + 5 * weights
        + 2 * config.trainer.micro_batch_tokens * per_logits
        + 0.1 * config.trainer.buffer_mb,
    }


def _cache_bytes_per_token(text: Mapping[str, Any]) -> float:
    heads = int(text.get("num_attention_heads") or 1)
    key_heads = int(text.get("num_key_value_heads") or heads)
    width = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    return 2.0 * int(text.get("num_hidden_layers") or 0) * key_heads * width * FLOAT32


def _free_mb() -> float:
    """Memory that can be had without swapping; the whole of it where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1000
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"model.path: {str(file.parent)!r} is no model folder: no config.json")
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"model.path: cannot read {file}: {err}") from err
    for key in ("model_type", "architectures"):
        if not isinstance(fields, dict) or not fields.get(key):
            raise ConfigError(f"model.path: {file}: field {key!r} is missing")
    return fields


def _check_class(folder: Path, fields: Mapping[str, Any]) -> None:
    """The installed transformers has the model; looked up without importing it."""
    kind, name = str(fields["model_type"]).replace("-", "_"), str(fields["architectures"][0])
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return  # `packages` says so
    source = Path(library.origin).parent / "models" / kind / f"modeling_{kind}.py"
    if not source.is_file() or f"class {name}(" not in source.read_text(encoding="utf-8"):
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: the installed transformers has no class "
            f"{name!r} of model_type {kind!r}; install a newer one or take another model"
        )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ConfigError(f"model.path: {folder} has no model.safetensors")
        return [single]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as err:
        raise ConfigError(f"model.path: cannot read {index}: {err!r}") from err
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of {len(names)} weight files: {missing[0]}"
        )
    return [folder / name for name in sorted(names)]


def _check_vocabulary(
    folder: Path,
    text: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tokenizer: Tokenizer,
) -> None:
    """The embedding is as the configuration says, and has a row for every token."""
    promised = (int(text.get("vocab_size") or 0), int(text.get("hidden_size") or 0))
    name = next((name for name in sorted(shapes) if name.endswith("embed_tokens.weight")), None)
    if name is not None and shapes[name] != promised:
        raise ConfigError(
            f"model.path: {folder}: config.json says vocab_size x hidden_size {promised}, "
            f"but {name} is {shapes[name]}: weights and configuration do not belong together"
        )
    if tokenizer.vocab_size > promised[0]:
        raise ConfigError(
            f"model.path: {folder}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {promised[0]}: they do not belong together"
        )


def _amount(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
