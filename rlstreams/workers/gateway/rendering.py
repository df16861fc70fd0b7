"""The choice of a renderer for a model's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstreams.workers.gateway.plain import PlainRenderer
from rlstreams.workers.gateway.port import Renderer
from rlstreams.workers.gateway.template import TemplateRenderer
from rlstreams.workers.model.tokenizer import Tokenizer

TEMPLATE = "template"


def make_renderer(
    tokenizer: Tokenizer,
    stop_ids: frozenset[int] = frozenset(),
    *,
    family: str = "",
    options: Mapping[str, Any] | None = None,
    keeps_thoughts: bool = False,
) -> Renderer:
    """The renderer of a model.

    Args:
        tokenizer: with the template and the options that the run uses.
        stop_ids: tokens that end an answer, as the model's folder names them.
        family: of the library's; "template": none of them; "": the one that writes what the
            chat template writes, if there is one.
        options: of the template, the same as the tokenizer's.
        keeps_thoughts: see `of_family`.

    Raises:
        ConfigError: a family that is not there, or of another tokenizer.
    """
    if family and family != TEMPLATE:
        from rlstreams.workers.gateway.library import of_family

        return of_family(
            tokenizer, family, stop_ids, options=options, keeps_thoughts=keeps_thoughts
        )
    if not tokenizer.has_template:
        return PlainRenderer(tokenizer, stop_ids)
    by_template = TemplateRenderer(tokenizer, stop_ids)
    if family == TEMPLATE:
        return by_template
    from rlstreams.workers.gateway.library import found_family

    found = found_family(
        tokenizer, by_template, stop_ids, options=options, keeps_thoughts=keeps_thoughts
    )
    return found or by_template
