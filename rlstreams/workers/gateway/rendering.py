"""The choice of a renderer for a model's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstreams.workers.gateway.plain import PlainRenderer
from rlstreams.workers.gateway.port import Renderer
from rlstreams.workers.gateway.template import TemplateRenderer
from rlstreams.workers.model.tokenizer import Tokenizer


def make_renderer(
    tokenizer: Tokenizer,
    stop_ids: frozenset[int] = frozenset(),
    *,
    options: Mapping[str, Any] | None = None,
) -> Renderer:
    """The renderer of a model: the library's that writes what the template writes, if there is one.

    Args:
        tokenizer: with the template and the options that the run uses.
        stop_ids: tokens that end an answer, as the model's folder names them.
        options: of the template, the same as the tokenizer's.
    """
    if not tokenizer.has_template:
        return PlainRenderer(tokenizer, stop_ids)
    by_template = TemplateRenderer(tokenizer, stop_ids)
    from rlstreams.workers.gateway.library import found_family

    return found_family(tokenizer, by_template, stop_ids, options=options) or by_template
