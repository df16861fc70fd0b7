"""A session's main chain and its branches, and the sample that they become. Pure.

The main chain is the path to the call whose answer was judged. Where no outcome names a call:

1. the calls that answered the newest start of the agent count: a start that forked from an earlier
   one's calls has not made the rest of these. Among them, those count whose answer a client waited
   for, if there is one; of these, those that are not auxiliary (`is_trained`), if there is one;
2. the tree is that of the first root; if any call has tools, of the first root below which a call
   has them (calls without tools beside such ones are titles and summaries);
3. the end is its deepest call, by the number of calls above it; of several as deep the one that was
   committed last, and the chain names the others: a last request and its repetition by an agent
   cannot be distinguished.

Branches are the paths to all other calls that count and are learnt from, if the session has them
(`SessionOpened.branches`): forks, sub-agents, rewritten histories. No branch goes on behind a
judged answer.

Segments of a sample: the root's prompt, and each call's sampled tokens, between them `environment`.
Tokens of a call that is not learnt from are `environment` too: they are read, and have no version.
A branch is a row of its own behind that. Its `prompt` is everything before its first answer that no
earlier row has, so each sampled token is the policy's in one row only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from rlstreams.schemas.events import TRAIN, CallCommitted, Segment, Tensor
from rlstreams.streams.sessions.experts import (
    Part,
    Rows,
    one_behind_another,
    row_versions,
    stitched,
)
from rlstreams.streams.sessions.session import Node, Session, added, sampled_tokens

MAX_REQUEST_BYTES = 1 << 26  # of one request's JSON, unpacked


class NoChainError(ValueError):
    """A session that no sample can be made of; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A path whose first calls are in earlier rows."""

    nodes: tuple[Node, ...]  # from the root on
    num_known: int  # nodes that are in earlier rows; below len(nodes)

    @property
    def own(self) -> tuple[Node, ...]:
        """Calls whose answers are the policy's in its row."""
        return self.nodes[self.num_known :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The path of a session's tree that becomes a sample's first row, and its branches."""

    nodes: tuple[Node, ...]  # from the root on; at least one
    ties: tuple[str, ...] = ()  # ids of other calls as deep; commit order chose among them
    branches: tuple[Branch, ...] = ()  # in commit order of their last calls

    @property
    def calls(self) -> tuple[CallCommitted, ...]:
        """The calls of the main chain, from the root on."""
        return tuple(node.call for node in self.nodes)

    @property
    def rows(self) -> tuple[Branch, ...]:
        """The main chain, and the branches."""
        return (Branch(nodes=self.nodes, num_known=0), *self.branches)

    @property
    def delivered(self) -> frozenset[Node]:
        """Calls whose answers are the sample's, in some row."""
        return frozenset(node for row in self.rows for node in row.own)

    @property
    def trained_tokens(self) -> int:
        """Number of its sampled tokens that can be learnt from."""
        calls = (node.call for node in self.delivered)
        return sum(sampled_tokens(call) for call in calls if is_learnt_from(call))


def is_learnt_from(call: CallCommitted) -> bool:
    """Whether a call's tokens are the policy's own choice, and meant for training."""
    return call.is_trained and not call.constrained


def main_chain(session: Session, terminal: str | None = None) -> Chain:
    """Return the path that becomes the session's sample, with its branches.

    Args:
        terminal: the call whose answer was judged; None: no outcome names one.

    Raises:
        NoChainError: no call, a terminal that is not there, a call whose prompt is not known, or no
            call on the path that is learnt from.
    """
    if not session.nodes:
        raise NoChainError(f"session {session.session_id} has no call")
    if terminal is not None:
        if (node := session.nodes.get(terminal)) is None:
            raise NoChainError(f"session {session.session_id} has no call {terminal}")
        if node.problem:
            raise NoChainError(f"call {terminal}: {node.problem}")
        return _learnt(Chain(nodes=node.path, branches=_branches(session, node.path, node)))
    counted = session.newest
    known = [node for node in counted if not node.problem]
    if not known:
        first = counted[0]
        raise NoChainError(f"call {first.call.call_id}: {first.problem}")
    known = [node for node in known if session.is_heard(node)] or known
    known = [node for node in known if node.call.is_trained] or known
    with_tools = [node.root for node in known if has_tools(node.call)]
    root = min(with_tools, key=lambda node: node.number, default=known[0].root)
    tree = [node for node in known if node.root is root]
    deepest = max(node.depth for node in tree)
    *others, last = (node for node in tree if node.depth == deepest)
    ties = tuple(node.call.call_id for node in others)
    return _learnt(Chain(nodes=last.path, ties=ties, branches=_branches(session, last.path)))


def _learnt(chain: Chain) -> Chain:
    if not any(map(is_learnt_from, chain.calls)):
        last = chain.calls[-1]
        raise NoChainError(
            f"none of the {len(chain.calls)} calls up to call {last.call_id} is learnt from: all "
            "are auxiliary or constrained"
        )
    return chain


def _branches(
    session: Session, main: Sequence[Node], judged: Node | None = None
) -> tuple[Branch, ...]:
    """Return the branches that are learnt from beside the main chain.

    Args:
        judged: the judged call; no call behind it is learnt from.
    """
    opened = session.opened
    if opened is None or not opened.branches or opened.purpose != TRAIN:
        return ()
    if not any(map(_has_words, main)):
        return ()  # no sample can be made of that main chain
    wanted = [
        node
        for node in session.newest
        if not node.problem and _has_words(node) and session.is_heard(node)
    ]
    inner = {above for node in wanted for above in node.path[:-1]}
    known, found = set(main), []
    for node in wanted:
        if node in inner or node in known or (judged is not None and judged in node.path):
            continue
        num_known = sum(above in known for above in node.path)
        found.append(Branch(nodes=node.path, num_known=num_known))
        known.update(node.path)
    return tuple(found)


def _has_words(node: Node) -> bool:
    return is_learnt_from(node.call) and sampled_tokens(node.call) > 0


def has_tools(call: CallCommitted) -> bool:
    """Whether a call's request offers tools; one that cannot be read offers none."""
    try:
        body = json.loads(unpacked(call.request))
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and bool(body.get("tools"))


def unpacked(packed: bytes) -> bytes:
    """Unpack a request or an answer.

    Raises:
        ValueError: it cannot be unpacked, or is too large.
    """
    try:
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_REQUEST_BYTES)
    except (zstandard.ZstdError, MemoryError) as err:
        raise ValueError(f"a request of {len(packed)} packed bytes: {err}") from err


def segments_of(chain: Chain) -> tuple[Segment, ...]:
    """Return a chain's tokens as the segments of a trajectory, row by row.

    A row ends with the policy: tokens behind the last one that is learnt from are left out. A
    row without any such token stays whole.

    Raises:
        schemas.TensorError: a tensor that cannot be read.
    """
    return tuple(segment for row in chain.rows for segment in _row(row))


def _row(row: Branch) -> tuple[Segment, ...]:
    return tuple(_joined(_kept(list(_segments(row)))))


def _segments(row: Branch) -> Iterator[Segment]:
    known = [ids for node in row.nodes[: row.num_known] for ids in added(node.call)]
    for number, node in enumerate(row.own):
        call = node.call
        author, ids = "environment", call.new_ids
        if not number:
            author, ids = "prompt", Tensor.of(np.concatenate([*known, ids.numpy()]))
        yield Segment(author=author, token_ids=ids)
        for segment in call.segments:
            is_policy = is_learnt_from(call)
            yield (
                segment if is_policy else Segment(author="environment", token_ids=segment.token_ids)
            )


def _kept(segments: list[Segment]) -> list[Segment]:
    policy = [n for n, s in enumerate(segments) if s.author == "policy" and len(s.token_ids)]
    return segments[: policy[-1] + 1] if policy else segments


def _joined(segments: list[Segment]) -> Iterator[Segment]:
    """Yield segments with the environment's neighbours joined, and empty ones of it left out."""
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
    """Return the routed experts of `segments_of` and the mask of recorded rows (None: all), as a
    trajectory has them; None, None if nothing was captured.

    Raises:
        ValueError: rows outside the sample, or calls that disagree on layers, top_k or dtype.
        schemas.TensorError: a tensor that cannot be read.
    """
    rows, mask = one_behind_another([_experts(row) for row in chain.rows])
    if rows is None:
        return None, None
    is_whole = mask is None or bool(mask.all())
    return Tensor.of(rows, "zstd"), None if is_whole or mask is None else Tensor.of(mask, "zstd")


def _experts(row: Branch) -> tuple[Rows | None, npt.NDArray[np.uint8] | None, int]:
    """Return one row's experts, the mask of recorded ones (None: all), and its number of tokens."""
    num_tokens = sum(len(segment.token_ids) for segment in _row(row))
    sampled = [span for node in row.nodes for span in _spans(node)]
    versions = row_versions(row.nodes[-1].end, [(s.policy_version, end) for s, end in sampled])
    rows, mask = stitched(versions, [part for node in row.nodes for part in _parts(node)])
    end = num_tokens - 1
    return None if rows is None else rows[:end], None if mask is None else mask[:end], num_tokens


def _spans(node: Node) -> Iterator[tuple[Segment, int]]:
    """Yield a call's sampled segments, learnt from or not, each with its end in the sequence."""
    end = node.call.prompt_tokens
    for segment in node.call.segments:
        end += len(segment.token_ids)
        if len(segment.token_ids):
            yield segment, end


def _parts(node: Node) -> Iterator[Part]:
    """Yield a call's rows by the version that passed them: up to a segment's last token but one."""
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


def off_path(session: Session, chain: Chain) -> int:
    """Return the number of sampled tokens of calls that are in no row of its sample."""
    delivered = chain.delivered
    return sum(sampled_tokens(n.call) for n in session.nodes.values() if n not in delivered)


def undelivered_share(session: Session, chain: Chain | None) -> float:
    """Return the share of a session's sampled tokens that its sample does not bring to the trainer
    as the policy's; 0 if nothing was sampled."""
    sampled = sum(sampled_tokens(call) for call in session.calls)
    delivered = 0 if chain is None else chain.trained_tokens
    return 1 - delivered / sampled if sampled else 0.0
