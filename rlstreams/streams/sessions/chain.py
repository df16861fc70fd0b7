"""A session's main chain, and the sample that it becomes. Pure.

The main chain is the path to the call whose answer was judged. Where nobody named one:

1. calls count that the newest start of the agent was answered with: one that forked from what an
   earlier start did has not done the rest of that;
2. the tree is that of the first root; if any call has tools, of the first root below which a call
   has them (calls without tools beside such ones are titles and summaries);
3. the end is its deepest call, by the number of calls above it; of several as deep the one that was
   committed last, and the chain names the others: a last request that an agent repeated cannot be
   told from its repetition.

Segments of a sample: the root's prompt, and per call what was sampled, between them `environment`.
Tokens of a call that is not learnt from are `environment` too: they are read, and have no version.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from rlstreams.schemas.events import CallCommitted, Segment, Tensor
from rlstreams.streams.sessions.experts import Part, Rows, row_versions, stitched
from rlstreams.streams.sessions.session import Node, Session, sampled_tokens

MAX_REQUEST_BYTES = 1 << 26  # of one request's JSON, unpacked


class NoChainError(ValueError):
    """A session of which no sample can be made; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A path of a session's tree that becomes a sample."""

    nodes: tuple[Node, ...]  # from the root on; at least one
    ties: tuple[str, ...] = ()  # ids of other calls that are as deep; it was chosen by commit order

    @property
    def calls(self) -> tuple[CallCommitted, ...]:
        """From the root on."""
        return tuple(node.call for node in self.nodes)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens of it that can be learnt from."""
        return sum(sampled_tokens(call) for call in self.calls if is_learnt_from(call))


def is_learnt_from(call: CallCommitted) -> bool:
    """Whether its tokens are the policy's own choice, and wanted."""
    return call.is_trained and not call.constrained


def main_chain(session: Session, terminal: str | None = None) -> Chain:
    """The path that becomes the session's sample.

    Args:
        terminal: the call whose answer was judged; None: as nobody named one.

    Raises:
        NoChainError: no call, one that is not there, or one whose prompt is not known.
    """
    if not session.nodes:
        raise NoChainError(f"session {session.session_id} has no call")
    if terminal is not None:
        if (node := session.nodes.get(terminal)) is None:
            raise NoChainError(f"session {session.session_id} has no call {terminal}")
        if node.problem:
            raise NoChainError(f"call {terminal}: {node.problem}")
        return Chain(nodes=node.path)
    counted = session.newest
    known = [node for node in counted if not node.problem]
    if not known:
        first = counted[0]
        raise NoChainError(f"call {first.call.call_id}: {first.problem}")
    with_tools = [node.root for node in known if has_tools(node.call)]
    root = min(with_tools, key=lambda node: node.number, default=known[0].root)
    tree = [node for node in known if node.root is root]
    deepest = max(node.depth for node in tree)
    *others, last = (node for node in tree if node.depth == deepest)
    return Chain(nodes=last.path, ties=tuple(node.call.call_id for node in others))


def has_tools(call: CallCommitted) -> bool:
    """Whether its request offers tools; one that cannot be read offers none."""
    try:
        body = json.loads(unpacked(call.request))
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and bool(body.get("tools"))


def unpacked(packed: bytes) -> bytes:
    """A request or an answer as it was before it was packed.

    Raises:
        ValueError: it cannot be unpacked, or is too large.
    """
    try:
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_REQUEST_BYTES)
    except (zstandard.ZstdError, MemoryError) as err:
        raise ValueError(f"a request of {len(packed)} packed bytes: {err}") from err


def segments_of(chain: Chain) -> tuple[Segment, ...]:
    """Its tokens as the segments of a trajectory.

    The last word is the policy's: tokens behind the last that is learnt from are left out. Without
    one that is, all of them stay.

    Raises:
        schemas.TensorError: a tensor that cannot be read.
    """
    return tuple(_joined(_kept(list(_segments(chain)))))


def _segments(chain: Chain) -> Iterator[Segment]:
    for node in chain.nodes:
        call = node.call
        author = "prompt" if node.parent is None else "environment"
        yield Segment(author=author, token_ids=call.new_ids)
        for segment in call.segments:
            is_policy = is_learnt_from(call)
            yield (
                segment if is_policy else Segment(author="environment", token_ids=segment.token_ids)
            )


def _kept(segments: list[Segment]) -> list[Segment]:
    policy = [n for n, s in enumerate(segments) if s.author == "policy" and len(s.token_ids)]
    return segments[: policy[-1] + 1] if policy else segments


def _joined(segments: list[Segment]) -> Iterator[Segment]:
    """Neighbours by the environment as one, and none without tokens."""
    for author, run in itertools.groupby(segments, lambda s: s.author):
        if author != "environment":
            yield from run
            continue
        parts = [segment for segment in run if len(segment.token_ids)]
        if len(parts) == 1:
            yield parts[0]
        elif parts:
            ids = np.concatenate([part.token_ids.numpy() for part in parts])
            yield Segment(author=author, token_ids=Tensor.of(ids))


def experts_of(chain: Chain) -> tuple[Tensor | None, Tensor | None]:
    """Routed experts of `segments_of`, and which rows are recorded (None: all), as a trajectory
    has them; None, None if nothing was captured.

    Raises:
        ValueError: rows outside the sample, or calls that disagree on layers, top_k or dtype.
        schemas.TensorError: a tensor that cannot be read.
    """
    num_tokens = sum(len(segment.token_ids) for segment in segments_of(chain))
    sampled = list(_sampled(chain))
    versions = row_versions(chain.nodes[-1].end, [(s.policy_version, end) for s, end in sampled])
    rows, mask = stitched(versions, [part for node in chain.nodes for part in _parts(node)])
    if rows is None:
        return None, None
    rows = rows[: num_tokens - 1]
    if mask is not None:
        mask = mask[: num_tokens - 1]
    is_whole = mask is None or bool(mask.all())
    return Tensor.of(rows, "zstd"), None if is_whole or mask is None else Tensor.of(mask, "zstd")


def _sampled(chain: Chain) -> Iterator[tuple[Segment, int]]:
    """What was sampled, learnt from or not, and where it ends in the sample."""
    for node in chain.nodes:
        yield from _spans(node)


def _spans(node: Node) -> Iterator[tuple[Segment, int]]:
    end = node.call.prompt_tokens
    for segment in node.call.segments:
        end += len(segment.token_ids)
        if len(segment.token_ids):
            yield segment, end


def _parts(node: Node) -> Iterator[Part]:
    """A call's rows by the version that passed them: up to the token before its segment's last."""
    if node.call.routed_experts is None:
        return
    rows: Rows = node.call.routed_experts.numpy()
    start = node.call.routed_experts_start
    for segment, end in _spans(node):
        num = max(0, end - 1 - start)
        yield segment.policy_version, start, rows[:num]
        rows, start = rows[num:], start + num
    if len(rows):
        raise ValueError(
            f"routed_experts of call {node.call.call_id} have {len(rows)} rows behind the token "
            f"before its last, {node.end - 1}"
        )


def undelivered_share(session: Session, chain: Chain | None) -> float:
    """The share of the session's sampled tokens that its sample does not bring to the trainer as
    the policy's; 0 if nothing was sampled."""
    sampled = sum(sampled_tokens(call) for call in session.calls)
    delivered = 0 if chain is None else chain.trained_tokens
    return 1 - delivered / sampled if sampled else 0.0
