"""Prompt and answer of each sample as text: for rows of a page, and for searches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from rlstreams.schemas.events import TensorError, Trajectory
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.rows import main_row
from rlstreams.words.spelling import Spelling

KEPT_CHARACTERS = 400_000_000  # of all texts; then the oldest are forgotten
HEAD, TAIL = 110, 50  # characters that are shown of a long text
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One sample's prompt, answer and reward as text."""

    prompt: str
    answer: str  # all behind the prompt; several turns are a line each: `policy: 7`
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward
    note: str = ""  # the reason for that reward


def text_of(event: Trajectory, spelling: Spelling) -> SampleText:
    """Return a sample's text, without special tokens; as numbers where there is no tokenizer.

    Raises:
        TensorError: its tokens cannot be read.
    """
    return _tokens_of(event).text(spelling)


def short(text: str) -> str:
    """Return a text in one line: a long one's beginning and end, a short one whole."""
    line = " ".join(text.split())
    return line if len(line) <= HEAD + TAIL else f"{line[:HEAD]} … {line[-TAIL:]}"


def as_lines(turns: Sequence[tuple[str, str]]) -> str:
    """Return (author, text) as one text: a line a turn, as `policy: 7`; one turn as it is."""
    if len(turns) == 1:
        return turns[0][1]
    return "\n".join(f"{author}: {text.strip()}" for author, text in turns)


def parts_line(parts: Mapping[str, float]) -> str:
    """Return `form 0.5, right 1`."""
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Token ids to be spelled: copies, because a decoded tensor keeps its whole record alive."""

    prompt_N: Ids
    turns: Sequence[tuple[str, Ids]]  # author and ids of all behind the prompt
    reward: float
    parts: Mapping[str, float]
    note: str

    def text(self, spelling: Spelling) -> SampleText:
        """Spell the tokens."""
        return SampleText(
            prompt=sys.intern(spelling.plain(self.prompt_N.tolist())),  # siblings share it
            answer=self._answer(spelling),
            reward=self.reward,
            parts=self.parts,
            note=self.note,
        )

    def _answer(self, spelling: Spelling) -> str:
        return as_lines([(author, spelling.plain(ids_N.tolist())) for author, ids_N in self.turns])


def _tokens_of(event: Trajectory) -> _Tokens:
    turns = [
        (author, np.concatenate([np.asarray(one.token_ids.numpy(), np.int32) for one in segments]))
        for author, segments in groupby(main_row(event), lambda segment: segment.author)
    ]
    has_prompt = bool(turns) and turns[0][0] == "prompt"
    return _Tokens(
        prompt_N=turns[0][1] if has_prompt else np.empty(0, np.int32),
        turns=turns[has_prompt:],
        reward=event.reward,
        parts=dict(event.reward_parts),
        note=event.reward_note,
    )


class Texts:
    """Texts of a run's samples by name, to be shown and searched; a sample's first record counts.

    One thread adds and spells, others read. Tokens become text when there is time for it
    (`spell`), or when a sample is asked for.

    Args:
        spelling: makes the spelling; called when a text is needed.
    """

    def __init__(self, spelling: Callable[[], Spelling]) -> None:
        self._spelling = spelling
        self._lock = Lock()
        self._waiting: dict[str, _Tokens] = {}
        self._known: dict[str, SampleText] = {}
        self._size = 0

    def add(self, event: Trajectory) -> None:
        """Add a sample; one whose tokens cannot be read has no text."""
        name = sample_name(event)
        try:
            tokens = _tokens_of(event)
        except (TensorError, ValueError):
            return
        with self._lock:
            if name not in self._known:
                self._waiting.setdefault(name, tokens)

    @property
    def num_waiting(self) -> int:
        """Number of samples that a search does not see yet."""
        return len(self._waiting)

    def spell(self, num: int) -> int:
        """Make texts of at most `num` waiting samples; return their number."""
        with self._lock:
            names = [name for name, _ in zip(self._waiting, range(num), strict=False)]
        for name in names:
            self.of(name)
        return len(names)

    def of(self, name: str) -> SampleText | None:
        """Return a sample's text; None: not rolled out, not readable, or forgotten."""
        with self._lock:
            tokens = self._waiting.get(name)
            if tokens is None:
                return self._known.get(name)
        found = tokens.text(self._spelling())
        with self._lock:
            if self._waiting.pop(name, None) is not None:
                self._keep(name, found)
        return found

    def _keep(self, name: str, found: SampleText) -> None:
        self._known[name] = found
        self._size += _size(found)
        while self._size > KEPT_CHARACTERS:
            self._size -= _size(self._known.pop(next(iter(self._known))))

    def find(self, words: str) -> set[str]:
        """Return names of the samples whose prompt, answer or note has `words`, in either case."""
        wanted = words.casefold()
        with self._lock:
            known = list(self._known.items())
        return {
            name
            for name, text in known
            if wanted in text.answer.casefold()
            or wanted in text.prompt.casefold()
            or wanted in text.note.casefold()
        }


def _size(text: SampleText) -> int:
    return len(text.prompt) + len(text.answer) + len(text.note)
