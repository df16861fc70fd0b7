"""Nine tasks in five levels: problems, worked solutions, the reward, and the rows of a run.

    python -m infra.examples.reasoner.tasks --out runs/reasoner-base  # train.jsonl, held_out.jsonl

A problem is drawn from a seed. Its solution has a line for each stage of the working and ends with
`Answer: ...`. The prompt's text alone decides what is held out: no model has learnt such a problem.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LEVELS = (1, 2, 3, 4, 5)
HELD_OUT_PART = 16  # one prompt in so many
MARK = "Answer:"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = ("apple", "bread", "candle", "door", "eagle", "forest", "garden", "hammer", "island")
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class Problem(NamedTuple):
    """What is asked, the lines of its working, and the answer."""

    prompt: str
    working: Sequence[str]
    answer: str

    def solution(self, *, is_worked: bool = True) -> str:
        """With its working, or the bare answer."""
        return "\n".join([*(self.working if is_worked else ()), f"{MARK} {self.answer}"])

    @property
    def is_held_out(self) -> bool:
        """Whether no model may learn it."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_PART == 0


def total(rng: random.Random, level: int) -> Problem:
    """Terms added and subtracted; the working has running totals."""
    terms, digits = ((3, 1), (4, 2), (6, 3), (9, 3), (12, 4))[level - 1]
    numbers = [rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(terms)]
    so_far, shown, lines = numbers[0], str(numbers[0]), []
    for number in numbers[1:]:
        sign = rng.choice("+-")
        after = so_far + number if sign == "+" else so_far - number
        shown += f" {sign} {number}"
        lines.append(f"{so_far} {sign} {number} = {after}")
        so_far = after
    return Problem(f"Compute {shown}.", lines, str(so_far))


def product(rng: random.Random, level: int) -> Problem:
    """Two numbers multiplied; the working has a product for each digit, and their sum."""
    digits = ((2, 1), (2, 2), (3, 2), (3, 3), (4, 4))[level - 1]
    a, b = (rng.randint(10 ** (n - 1) + 1, 10**n - 1) for n in digits)
    parts = [int(d) * 10**i for i, d in enumerate(reversed(str(b)))]
    parts = [part for part in reversed(parts) if part]
    lines = [f"{a} * {part} = {a * part}" for part in parts]
    done = a * parts[0]
    for part in parts[1:]:
        lines.append(f"{done} + {a * part} = {done + a * part}")
        done += a * part
    return Problem(f"Compute {a} * {b}.", lines, str(a * b))


def equation(rng: random.Random, level: int) -> Problem:
    """One unknown on both sides; the working collects its factors, then the constants."""
    terms, largest = ((1, 5), (2, 9), (3, 9), (5, 20), (8, 30))[level - 1]
    x = rng.randint(-largest, largest)
    left, right = (
        [rng.choice((-1, 1)) * rng.randint(1, 9) for _ in range(n)] for n in (terms, terms - 1)
    )
    if sum(left) == sum(right):
        left[0] += 1 if left[0] != -1 else 2
    constants = [rng.randint(-largest, largest) for _ in range(terms)]
    factor, known = sum(left) - sum(right), sum(constants)
    value = factor * x + known
    one = [f"{f:+d}x" for f in left] + [f"{n:+d}" for n in constants]
    other = [f"{f:+d}x" for f in right] + [f"{value:+d}"]
    rng.shuffle(one)
    rng.shuffle(other)
    lines = [" ".join(word[:-1] for word in one if word[-1] == "x") + f" = {sum(left):+d}"]
    if right:
        lines.append(" ".join(word[:-1] for word in other if word[-1] == "x"))
        lines[-1] += f" = {sum(right):+d}"
        lines.append(f"{sum(left):+d} - {sum(right):+d} = {factor:+d}")
    lines.append(" ".join(word for word in one if word[-1] != "x") + f" = {known:+d}")
    lines.append(f"{factor:+d}x = {value:+d} - {known:+d} = {value - known:+d}")
    return Problem(f"Solve {' '.join(one)} = {' '.join(other)}.", lines, str(x))


def system(rng: random.Random, level: int) -> Problem:
    """Unknowns defined by others; the working puts in values in the order that allows it."""
    number = (2, 3, 5, 8, 12)[level - 1]
    names = rng.sample("abcdefghjkmnpqrstuvwxyz", number)
    values = {names[0]: rng.randint(2, 20)}
    stated, lines = [f"{names[0]} = {values[names[0]]}"], []
    for at, name in enumerate(names[1:], 1):
        one, other = names[at - 1], names[rng.randrange(at)]
        first, number = values[one], rng.randint(2, 9)
        kind = rng.choice("+-" if abs(first) > 99 else "+-*")
        if kind == "*" or other == one:
            other, second = str(number), number
        else:
            second = values[other]
        values[name] = {"+": first + second, "-": first - second, "*": first * second}[kind]
        stated.append(f"{name} = {one} {kind} {other}")
        lines.append(f"{stated[-1]} = {first} {kind} {second} = {values[name]}")
    rng.shuffle(stated)
    asked = names[-1]
    return Problem(f"Given {', '.join(stated)}: what is {asked}?", lines, str(values[asked]))


def ordered(rng: random.Random, level: int) -> Problem:
    """Numbers sorted; the working goes by first digits."""
    number = (4, 8, 14, 24, 40)[level - 1]
    numbers = rng.sample(range(10, 100) if level == 1 else range(100, 1000), number)
    by_digit = {d: sorted(n for n in numbers if str(n)[0] == d) for d in "123456789"}
    lines = [f"{d}: {' '.join(map(str, own))}" for d, own in by_digit.items() if own]
    answer = " ".join(map(str, sorted(numbers)))
    return Problem(f"Sort {' '.join(map(str, numbers))}.", lines, answer)


def count(rng: random.Random, level: int) -> Problem:
    """How often two words occur; the working counts along."""
    number = (6, 12, 20, 35, 60)[level - 1]
    known = rng.sample(WORDS, 5)
    words = rng.choices(known, k=number)
    so_far, marks = 0, []
    for word in words:
        so_far += word in known[:2]
        marks.append(f"{word} {so_far}")
    asked = f"How many are {known[0]} or {known[1]}:"
    return Problem(f"{asked} {' '.join(words)}?", [", ".join(marks)], str(so_far))


def walk(rng: random.Random, level: int) -> Problem:
    """Moves on a grid with walls, which keep one in place; the working has a place a move."""
    size, moves, walls = ((4, 4, 2), (5, 8, 4), (6, 14, 7), (7, 24, 10), (8, 40, 14))[level - 1]
    cells = [(x, y) for x in range(size) for y in range(size)]
    start, *closed = rng.sample(cells, walls + 1)
    x, y = start
    lines, taken = [], rng.choices(list(MOVES), k=moves)
    for move in taken:
        to = (x + MOVES[move][0], y + MOVES[move][1])
        is_free = to in cells and to not in closed
        x, y = to if is_free else (x, y)
        lines.append(f"{move} {to[0]},{to[1]} {'free' if is_free else 'blocked'}: {x},{y}")
    shown = " ".join(f"{a},{b}" for a, b in sorted(closed))
    prompt = f"Grid {size} by {size}, walls {shown}. From {start[0]},{start[1]} go"
    return Problem(f"{prompt} {' '.join(taken)}.", lines, f"{x},{y}")


def route(rng: random.Random, level: int) -> Problem:
    """A shortest path in a graph; the working has what is reached in each round."""
    number, extra = ((4, 1), (6, 2), (9, 3), (14, 5), (20, 8))[level - 1]
    names = rng.sample(LETTERS, number)
    pairs = [(names[at], names[rng.randrange(max(0, at - 4), at)]) for at in range(1, number)]
    pairs += [rng.sample(names, 2) for _ in range(extra)]
    edges = sorted({(min(pair), max(pair)) for pair in pairs})
    near: dict[str, set[str]] = {name: set() for name in names}
    for a, b in edges:
        near[a].add(b)
        near[b].add(a)
    start, end = rng.sample(names, 2)
    parent, ring, lines = {start: ""}, [start], []
    while end not in parent:
        found = []
        for name in ring:
            for other in sorted(near[name] - parent.keys()):
                parent[other] = name
                found.append(other)
        lines.append(f"{len(lines) + 1}: {' '.join(f'{parent[name]}-{name}' for name in found)}")
        ring = found
    path = [end]
    while parent[path[-1]]:
        path.append(parent[path[-1]])
    shown = [f"{a}-{b}" for a, b in edges]
    rng.shuffle(shown)
    prompt = f"Edges {' '.join(shown)}. A shortest path from {start} to {end}?"
    return Problem(prompt, lines, "-".join(reversed(path)))


def program(rng: random.Random, level: int) -> Problem:
    """Assignments, conditions and loops over three variables; the working traces each change."""
    statements, most = ((2, 1), (4, 2), (6, 3), (10, 4), (16, 5))[level - 1]
    values = {name: rng.randint(1, 9) for name in "abc"}
    text, lines = [f"{name} = {value}" for name, value in values.items()], []
    for _ in range(statements):
        target, other, number = rng.choice("abc"), rng.choice("abc"), rng.randint(2, 9)
        operator, kind = rng.choice("+-*"), rng.choice(("plain", "if", "repeat"))
        operand = str(number) if operator == "*" or rng.random() < 0.5 else other
        change = f"{target} = {target} {operator} {operand} mod 100"
        times, is_done = rng.randint(2, most + 1) if kind == "repeat" else 1, True
        if kind == "if":
            is_done = values[other] > number * 5
            text.append(f"if {other} > {number * 5}: {change}")
            lines.append(f"{other} = {values[other]} > {number * 5} {'yes' if is_done else 'no'}")
        else:
            text.append(f"repeat {times}: {change}" if kind == "repeat" else change)
        for _ in range(times if is_done else 0):
            by = int(operand) if operand.isdigit() else values[operand]
            before = values[target]
            after = {"+": before + by, "-": before - by, "*": before * by}[operator] % 100
            lines.append(f"{target} = {before} {operator} {by} = {after}")
            values[target] = after
    asked = rng.choice("abc")
    return Problem("\n".join(["Run", *text, f"print {asked}"]), lines, str(values[asked]))


Maker = Callable[[random.Random, int], Problem]
MAKERS: tuple[Maker, ...] = (
    total, product, equation, system, ordered, count, walk, route, program,
)  # fmt: skip
TASKS = {maker.__name__: maker for maker in MAKERS}


def reward(prompt: str, completion: str, answer: str, metadata: dict[str, object]) -> float:
    """1 if what follows the last mark is right: the answer, or a path that is as short."""
    _, mark, found = completion.rpartition(MARK)
    found = found.strip()
    if not mark or metadata.get("task") != "route":
        return float(bool(mark) and found == answer)
    edges = {frozenset(pair) for pair in re.findall(r"\b([A-Z])-([A-Z])\b", str(prompt))}
    path, given = found.split("-"), answer.split("-")
    is_path = all(frozenset(pair) in edges for pair in itertools.pairwise(path))
    return float(is_path and (len(path), path[0], path[-1]) == (len(given), given[0], given[-1]))


def cells(levels: Sequence[int], tasks: Mapping[str, Maker] = TASKS) -> list[tuple[str, int]]:
    """Every task of the first level, then of the next."""
    return [(task, level) for level in levels for task in tasks]


def problems(
    seed: int,
    number: int,
    of: Sequence[tuple[str, int]],
    *,
    held_out: bool,
    tasks: Mapping[str, Maker] = TASKS,
) -> Iterator[tuple[str, int, Problem]]:
    """Distinct problems, a cell after another, again and again: task, level, problem.

    Args:
        of: the cells, task and level.

    Raises:
        ValueError: a task has too few problems of a level.
    """
    rng, seen = random.Random(f"rows {seed} {held_out}"), set[str]()
    for task, level in itertools.islice(itertools.cycle(of), number):
        for _ in range(10_000):
            problem = tasks[task](rng, level)
            if problem.is_held_out == held_out and problem.prompt not in seen:
                break
        else:
            raise ValueError(f"{number} rows are too many: {task} of level {level} has no others")
        seen.add(problem.prompt)
        yield task, level, problem


def write_rows(path: Path, rows: Iterable[tuple[str, int, Problem]]) -> None:
    """JSON lines with `prompt`, `answer`, `task` and `level`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for task, level, problem in rows:
            row = {"prompt": problem.prompt, "answer": problem.answer}
            file.write(json.dumps(row | {"task": task, "level": level}) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/reasoner-base"))
    parser.add_argument("--levels", default="3,4,5", help="that reinforcement learning trains on")
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--held-out-rows", type=int, default=540)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    levels = [int(level) for level in args.levels.split(",")]
    if not set(levels) <= set(LEVELS):
        parser.error(f"--levels {args.levels}: levels are {', '.join(map(str, LEVELS))}")
    for name, number in (("train", args.rows), ("held_out", args.held_out_rows)):
        is_held_out = name == "held_out"
        found = problems(args.seed, number, cells(levels), held_out=is_held_out)
        write_rows(args.out / f"{name}.jsonl", found)


if __name__ == "__main__":
    main()
