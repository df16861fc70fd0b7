"""Lines of a Python function that is being generated, and those that several readers share."""

from __future__ import annotations

from functools import lru_cache
from types import CodeType
from typing import Any

# By the first byte of a text: bytes with the length byte, or 0: longer, negative, or more follow.
SHORT_TEXT = tuple(1 + (z >> 1) if z < 128 and z % 2 == 0 else 0 for z in range(256))

# What the second and the third byte of an integer add to it: they take the continuation bit of the
# byte before off again.
_SECOND = tuple((byte << 7) - (1 << 7) for byte in range(256))
_THIRD = tuple((byte << 14) - (1 << 14) for byte in range(256))
SIGNED = tuple(z >> 1 ^ -(z & 1) for z in range(128))  # what an integer of one byte says
_BYTES = {"SECOND": _SECOND, "THIRD": _THIRD, "SIGNED": SIGNED}

# With `n` the first byte of an unsigned integer at `i`, which goes on: reads it.
_MORE = (
    "if (n := n + SECOND[b[i + 1]]) < 16384:",
    "    i += 2",
    "elif (n := n + THIRD[b[i + 2]]) < 2097152:",
    "    i += 3",
    "else:",
    "    n, i = read_unsigned(b, i + 3, n - 2097152, 21)",
)

# Reads `n`, an unsigned integer at `i`.
UNSIGNED = ("n = b[i]", "if n < 128:", "    i += 1", f"el{_MORE[0]}", *_MORE[1:])

LENGTH = (*UNSIGNED, "if n & 1:", "    refuse('length', n, i)", "j = i + (n >> 1)")


def signed(target: str) -> list[str]:
    """Reads an integer at `i` to `target`; most have one byte."""
    value = f"{target} = ~(n >> 1) if n & 1 else n >> 1"
    longer = [f"    {line}" for line in (*_MORE, value)]
    return ["n = b[i]", "if n < 128:", "    i += 1", f"    {target} = SIGNED[n]", "else:", *longer]


def refuse(what: str, byte: int, i: int) -> bool:
    """A byte, or an encoded length, that stands for nothing."""
    raise ValueError(f"{what} encoded as {byte} at byte {i}")


@lru_cache(maxsize=128)
def _compiled(text: str, file: str) -> CodeType:
    """Each new audit reads the same fields, with tables of its own: only they are made anew."""
    return compile(text, file, "exec")


class Source:
    """Collects lines, hands out fresh names and holds what the lines refer to."""

    def __init__(self, **scope: object) -> None:
        self.scope: dict[str, Any] = _BYTES | scope
        self._lines: list[str] = []
        self._names = 0

    def add(self, depth: int, *lines: str) -> None:
        """Append lines at an indentation depth."""
        self._lines += ["    " * depth + line for line in lines]

    def name(self) -> str:
        """A name that nothing else has."""
        self._names += 1
        return f"v{self._names}"

    def twin(self, cls: Any) -> str:  # noqa: ANN401
        """The name of a class with the slots of `cls`, whose instances can still be written to."""
        if hasattr(cls, "__post_init__"):
            raise TypeError(f"{cls.__name__} checks itself at birth; decoding would step around it")
        name = f"New{cls.__name__}"
        self.scope[cls.__name__] = cls
        self.scope[name] = type(name, (), {"__slots__": cls.__slots__})
        return name

    def function(self, name: str, title: str) -> Any:  # noqa: ANN401
        """Compile; `title` is what a traceback shows as the file."""
        exec(_compiled("\n".join(self._lines), f"<{title}>"), self.scope)
        return self.scope[name]
