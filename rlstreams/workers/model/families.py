"""Support of the installed transformers for a family, read from its source: importing it is slow.

The same choices as loading makes, for callers that need them before; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlstreams.workers.model.folder import module_name, text_fields

# Kinds of layers, in the words of a configuration's `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = "linear_attention"  # a state instead of keys: whole sequences only, no cache of ours
KNOWN_LAYERS = frozenset({FULL, SLIDING, LINEAR})

SDPA, EAGER = "sdpa", "eager"

_HEAD = "ForCausalLM"  # end of the names of the library's classes that give log-probs of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """Facts of a family's class, from its source."""

    class_name: str
    has_class: bool
    sought: str  # the place of the search, and the nearest name there
    has_sdpa: bool
    has_expert_kernels: bool  # `experts_implementation` can be chosen


def library_model(config: Mapping[str, Any]) -> LibraryModel | None:
    """The class of a `config.json`; None if transformers is not installed."""
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return None
    module, name = module_name(config)
    root = Path(library.origin).parent
    source = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    return LibraryModel(
        class_name=name,
        has_class=f"class {name}(" in text,
        sought=_sought(source, text, name),
        has_sdpa="_supports_sdpa = True" in text,
        has_expert_kernels="@use_experts_implementation" in text,
    )


def _sought(source: Path, text: str, name: str) -> str:
    """The file, and the class there with the nearest name; without a file, the nearest family."""
    if text:
        classes = re.findall(r"^class (\w+)\(", text, re.MULTILINE)
        heads = [known for known in classes if known.endswith(_HEAD)]
        near = get_close_matches(name, heads or classes, n=1) or heads[:1]
        hint = f", where {near[0]} is nearest" if near else ""
        return f"looked for in {source}{hint}"
    models, kind = source.parent.parent, source.parent.name
    families = [path.name for path in models.glob("*/") if path.is_dir()]
    near = get_close_matches(kind, sorted(families), n=1)
    hint = f", where {near[0]} is nearest" if near else ""
    return f"there is no {kind} in {models}{hint}"


def chosen_attention(config: Mapping[str, Any], *, has_sdpa: bool) -> str:
    """`sdpa` where it computes the model's definition, else `eager`.

    sdpa has no place for attention sinks (such classes say that they do not support it), nor for
    soft-capped scores (Gemma 2, https://arxiv.org/abs/2408.00118), which it would leave out.
    """
    is_capped = bool(text_fields(config).get("attn_logit_softcapping"))
    return SDPA if has_sdpa and not is_capped else EAGER
