"""Which renderer a model's messages go through."""

from __future__ import annotations

from rlstreams.workers.gateway.plain import PlainRenderer
from rlstreams.workers.gateway.port import Renderer
from rlstreams.workers.model.tokenizer import Tokenizer


def make_renderer(tokenizer: Tokenizer, stop_ids: frozenset[int] = frozenset()) -> Renderer:
    """The renderer of a model.

    Args:
        stop_ids: tokens that end an answer, as the model's folder names them.
    """
    return PlainRenderer(tokenizer, stop_ids)
