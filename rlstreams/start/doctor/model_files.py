"""Check that a model folder's files are whole and fit: class, weights, tokenizer.

Read are the small files and the headers of the safetensors files. Each check raises a `ConfigError`
that names file, field and both values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.model.families import KNOWN_LAYERS, LINEAR, LibraryModel
from rlstreams.workers.model.folder import vocab_size_of
from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

# Tokenizers in forms that transformers can turn into `tokenizer.json`.
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, of one file or of all that its index lists.

    Raises:
        ConfigError: a file is missing, damaged or of another format.
    """
    found = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                    tensor = opened.get_slice(name)
                    found[name] = StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as err:
            raise ConfigError(
                f"model.path: {file} is no whole safetensors file: {err}; it may be damaged: copy "
                "or download it again"
            ) from err
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ConfigError(f"model.path: {folder} has no model.safetensors")
        return [single]
    try:
        names = set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"model.path: cannot read {index}: {err!r}") from err
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of {len(names)} weight files: {missing[0]}"
        )
    return [folder / name for name in sorted(names)]


def check_class(folder: Path, text: Mapping[str, Any], library: LibraryModel | None) -> None:
    """The installed transformers has the model, and the built-in engine can decode it."""
    where, kind = f"model.path: {folder / 'config.json'}", text["model_type"]
    if library is not None and not library.has_class:
        raise ConfigError(
            f"{where}: transformers {version('transformers')} has no class "
            f"{library.class_name!r} of model_type {kind!r}: {library.sought}; correct "
            "architectures, install a newer one, or take another model"
        )
    if quantized := text.get("quantization_config"):
        raise ConfigError(
            f"{where}: the weights are quantized ({quantized.get('quant_method')}); "
            "name a folder with float weights, because these cannot be trained"
        )
    layers = set(text.get("layer_types") or ())
    if foreign := sorted(layers - KNOWN_LAYERS):
        known = ", ".join(sorted(KNOWN_LAYERS))
        raise ConfigError(f"{where}: layer_types has {', '.join(foreign)}; known are {known}")
    if LINEAR in layers:
        raise ConfigError(
            f"{where}: layer_types has {LINEAR}: such layers carry a state that the "
            "built-in engine's cache does not hold; take a model without them"
        )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        others = [name for name in _OTHER_TOKENIZERS if (folder / name).is_file()]
        if not others:
            raise ConfigError(
                f"model.path: {folder} has no tokenizer (no tokenizer.json): copy the one that "
                "the model was trained with beside its config.json"
            )
        raise ConfigError(
            f"model.path: {folder} has {' and '.join(others)} but no tokenizer.json; "
            "make it once:\n"
            '  python -c "import sys; from transformers import AutoTokenizer as A; '
            f'A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])" {folder}'
        )
    try:
        return Tokenizer.load(folder)
    except TokenizerError as err:
        raise ConfigError(f"model.path: {err}") from err


def check_vocabulary(
    folder: Path, text: Mapping[str, Any], tensors: Mapping[str, StoredTensor], tokenizer: Tokenizer
) -> None:
    """The embedding is as the configuration says, and has a row for every token."""
    promised = (vocab_size_of(text), int(text.get("hidden_size") or 0))
    name = next((name for name in sorted(tensors) if name.endswith("embed_tokens.weight")), None)
    if name is not None and promised[1] and tensors[name].shape != promised:
        raise ConfigError(
            f"model.path: {folder}: config.json says vocab_size x hidden_size {promised}, but "
            f"{name} is {tensors[name].shape}: weights and configuration do not belong together"
        )
    if tokenizer.vocab_size > promised[0]:
        raise ConfigError(
            f"model.path: {folder}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {promised[0]}: they do not belong together; copy the tokenizer that "
            "the model was trained with"
        )


def check_special_tokens(
    folder: Path, text: Mapping[str, Any], eos_ids: frozenset[int], tokenizer: Tokenizer
) -> None:
    """The tokens that begin and end a sequence for the model are tokens of its tokenizer.

    A tokenizer of another model with a smaller vocabulary shows here: it fits, and lacks them.
    """
    named = {("eos_token_id", token) for token in eos_ids}
    if text.get("bos_token_id") is not None:
        named.add(("bos_token_id", int(text["bos_token_id"])))
    for field, token in sorted(named):
        if tokenizer.token(token) is None:
            raise ConfigError(
                f"model.path: {folder}: {field} of the model is {token}, and the tokenizer "
                f"({tokenizer.vocab_size} tokens) has no such token: they do not belong together; "
                "copy the tokenizer that the model was trained with"
            )
    own = tokenizer.eos_id
    if own is not None and eos_ids and own not in eos_ids:
        ends = ", ".join(f"{tokenizer.token(t)!r} ({t})" for t in sorted(eos_ids))
        raise ConfigError(
            f"model.path: {folder}: answers of the model end at {ends}, but the tokenizer ends a "
            f"text with {tokenizer.token(own)!r} ({own}): they do not belong together, or "
            "generation_config.json must list both as eos_token_id"
        )
