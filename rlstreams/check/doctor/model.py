"""Check that a model folder can be loaded, from its small files and its tensors' headers.

Neither torch nor the weights are read. Each refusal names file, field and both values.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from rlstreams.check.doctor.check import EVERYTHING, Check, Host, ok, warn
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.config.run import START, RunConfig
from rlstreams.workers.config.trainer import MEGATRON
from rlstreams.workers.logprob.reference import check_tokens
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.families import (
    KNOWN_LAYERS,
    LINEAR,
    LibraryModel,
    chosen_attention,
    library_model,
)
from rlstreams.workers.model.folder import (
    check_heads,
    eos_ids_of,
    max_tokens_of,
    num_experts_of,
    read_config,
    text_fields,
    vocab_size_of,
)
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.shims import check_installed
from rlstreams.workers.model.megatron.tables import check_layout, plain_config
from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

# Tokenizers in forms that transformers can turn into `tokenizer.json`.
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # in a weight's name
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors")
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, of one file or of all that its index lists.

    Raises ConfigError: a file is missing, damaged or of another format.
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
            others = [name for name in _OTHER_WEIGHTS if (folder / name).is_file()]
            found = f"{' and '.join(others)} but no" if others else "no"
            raise ConfigError(
                f"model.path: {folder} has {found} model.safetensors: `save_pretrained` of "
                "transformers writes it"
            )
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
    """The installed transformers has the model, and its layers are of kinds that are known."""
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


def check_depth(folder: Path, text: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """No layer of the configuration is without weights. More weights may be of another head."""
    numbers = [int(found[1]) for name in tensors if (found := _LAYER.search(name))]
    promised, stored = int(text.get("num_hidden_layers") or 0), max(numbers, default=-1) + 1
    if 0 < stored < promised:
        raise ConfigError(
            f"model.path: {folder}: config.json says num_hidden_layers {promised}, but there are "
            f"weights of {stored}: weights and configuration do not belong together"
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


SIZES = {"float32": 4, "bfloat16": 2}  # by model.dtype, bytes a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder that can be loaded, as far as its headers show."""

    path: Path
    config: Mapping[str, Any]  # of the language model
    num_parameters: int
    stored_as: str  # dtypes of its tensors, the commonest first
    attention: str  # the kernels that will compute it
    has_expert_kernels: bool
    tokenizer: Tokenizer
    eos_ids: frozenset[int]  # tokens that end an answer

    def mb_in(self, dtype: str) -> float:
        """Weights as they are computed with under `model.dtype`."""
        return self.num_parameters * SIZES[dtype] / 1e6

    @property
    def longest(self) -> int | None:
        """Tokens that it was made for; None if the folder does not say."""
        return max_tokens_of(self.config)


def read_model(path: str, field: str = "model.path") -> ModelFolder:
    """Read what is small, check that it fits together; a model of the hub is fetched first.

    Raises ConfigError: names file and field, and what was found.
    """
    folder = model_folder(path)
    if folder.is_file():
        raise ConfigError(f"{field}: {path!r} is a file; name the folder that it is in")
    if not folder.is_dir():
        raise ConfigError(
            f"{field}: there is no folder {path!r}{meant_path(folder)} "
            "(a model of the Hugging Face hub is named hf:ORG/NAME)"
        )
    if not (folder / "config.json").is_file():
        below = [str(file.parent) for file in sorted(folder.glob("*/config.json"))]
        hint = f"; did you mean {below[0]!r}?" if below else ""
        raise ConfigError(f"{field}: {str(folder)!r} is no model folder: no config.json{hint}")
    try:
        return _read(folder)
    except EngineError as err:
        raise ConfigError(f"{field}: {err}") from err
    except ConfigError as err:  # of a part, which does not know the field that names the folder
        raise ConfigError(str(err).replace("model.path:", f"{field}:", 1)) from err


def _read(folder: Path) -> ModelFolder:
    text = text_fields(read_config(folder))
    library = library_model(text)
    check_class(folder, text, library)
    tensors = tensors_of(folder)
    tokenizer, eos_ids = load_tokenizer(folder), eos_ids_of(folder)
    check_vocabulary(folder, text, tensors, tokenizer)
    check_depth(folder, text, tensors)
    check_special_tokens(folder, text, eos_ids, tokenizer)
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    return ModelFolder(
        path=folder,
        config=text,
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        stored_as=" and ".join(name for name, _ in dtypes.most_common()),
        attention=chosen_attention(text, has_sdpa=library is None or library.has_sdpa),
        has_expert_kernels=library is not None and library.has_expert_kernels,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
    )


def check_reference(config: RunConfig, model: ModelFolder) -> str:
    """Describe the model that the loss compares with; "": there is none, or it is the start.

    Raises ConfigError: it is no model folder, or its token ids mean other tokens.
    """
    path = config.logprob.reference
    if path == START or not config.trainer.loss.why_compared:
        return ""
    found = read_model(path, "logprob.reference")
    check_tokens(config, found.path, model.path)
    return f"{found.path}: {_amount(found.num_parameters)} parameters"


def check_routers(config: RunConfig, model: ModelFolder) -> None:
    """Check that there are routers to replay; the roles themselves check the family's kind.

    Raises ConfigError: a dense model.
    """
    if config.trainer.routing_replay and not num_experts_of(model.config):
        raise ConfigError(
            f"trainer.routing_replay is true, but {model.path} is a dense model "
            f"({model.config['model_type']}): it has no routers; set it to false"
        )


def check_decoding(model: ModelFolder, sampled_by: str) -> None:
    """Check that the built-in engine can sample; a server and the other roles do not need it.

    Args:
        sampled_by: the setting or the command that samples with the built-in engine.

    Raises:
        ConfigError: a model with recurrent layers.
    """
    if LINEAR in (model.config.get("layer_types") or ()):
        raise ConfigError(
            f"{sampled_by}, but layer_types in {model.path / 'config.json'} has {LINEAR}: such "
            "layers carry a state that the built-in engine's cache does not hold; have a server "
            "sample (rollout.engine = 'vllm' or 'sglang'), or take a model without them"
        )


def check_layouts(config: RunConfig, model: ModelFolder, host: Host = EVERYTHING) -> str:
    """Describe the layouts that cut the model; "": no role here has one, or it is not known yet.

    Args:
        host: its roles are checked; others need no library here.

    Raises:
        ConfigError: it is not installed, has no table for the model, or a layout does not fit.
    """
    layouts, checked = {}, []
    sections = {"trainer": config.trainer} | (
        {"logprob": config.logprob} if config.has_scorer else {}
    )
    for role, section in sections.items():
        asked, ranks = section.layout, section.ranks
        if asked.cp > 1 and host.has(role):
            check_heads(model.config, asked.cp, role)
            checked.append(f"{role} {ranks} ranks, cp {asked.cp}")
        if section.backend == MEGATRON and host.has(role):
            layouts[role] = Layout(
                ranks=ranks, tp=asked.tp, pp=asked.pp, ep=asked.ep, asked_by=role
            )
    for role, layout in layouts.items():
        check_installed(f"{role}.backend")
        try:
            check_layout(plain_config(model.config), layout)
        except EngineError as err:
            where = f"{role}.backend is {MEGATRON!r}, model.path is {str(model.path)!r}"
            raise ConfigError(f"{where}: {err}") from err
        except AttributeError:
            continue  # config.json leaves a field to the library, so the role itself finds out
        size = f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
        checked.append(f"{role} {layout.ranks} ranks, {size}")
    return ", ".join(checked)


def model_checks(model: ModelFolder, dtype: str = "float32") -> Iterator[Check]:
    """Checks of the model's kind and size, its numerics, and the tokens that end its answers."""
    yield ok(
        "model",
        f"{model.path}: {model.config['model_type']}, {_amount(model.num_parameters)} parameters, "
        f"vocabulary {model.config.get('vocab_size')} (tokenizer {model.tokenizer.vocab_size}), "
        f"at most {model.longest or 'any number of'} tokens",
    )
    experts = num_experts_of(model.config)
    kernels = "grouped_mm" if model.has_expert_kernels else "the family's own"
    yield ok(
        "numerics",
        f"{dtype} (stored as {model.stored_as}), attention {model.attention}"
        + (f", {experts} experts by {kernels}" if experts else ""),
    )
    ends = ", ".join(f"{model.tokenizer.token(t)!r} ({t})" for t in sorted(model.eos_ids))
    if ends:
        yield ok("answers", f"end at {ends}")
    else:
        yield warn(
            "answers",
            "neither generation_config.json nor config.json names an eos_token_id: "
            "every answer runs to rollout.max_new_tokens",
            "name the token that ends an answer there, or set reward.require_stop = false",
        )


def _amount(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
