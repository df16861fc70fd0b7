"""Word problems of seven kinds in four levels, worked solutions, the reward, the rows of a run.

    python -m infra.examples.pretrained.tasks --out runs/pretrained-base --of runs/warm.json

Numbers, names and words are drawn, so that no template gives an answer away. `--of` names a result
of `evaluate`: rows are of those kinds and levels in which that model is right in 5 to 50 % of its
answers; `--only` names the kinds. What a problem is, how it is held out and how rows are drawn are
the reasoner's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.examples.reasoner.tasks import MARK, Maker, Problem, cells, problems, write_rows
from rlstreams.workers.rollout.child_verifiers import pattern

LEVELS = (1, 2, 3, 4)
PATTERN = rf"{MARK} ([^\n]+)\Z"  # of run.toml's verifier
LOW, HIGH = 0.05, 0.5
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate",
         "Leo", "Mia", "Noah", "Olga", "Paul", "Ruth", "Sam", "Tina", "Victor")  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "keys", "lamps", "marbles", "nuts",
          "pencils", "plates", "shells", "stamps", "stickers", "stones", "toys")  # fmt: skip
_WORDS = (
    "anchor apple arrow autumn badge basket beach bottle branch bread bridge brush bucket butter "
    "cabin camel candle carpet castle chair cherry circle clock cloud coffee copper corner cotton "
    "desert dinner doctor dragon eagle engine evening fabric family farmer feather fence finger "
    "flower forest frame garden ghost giant glass glove grape guitar hammer harbor helmet honey "
    "horse island jacket jungle kettle kitchen ladder lemon letter lion lizard market meadow "
    "mirror monkey morning mountain needle number ocean office onion orange orchard oven palace "
    "paper parrot pencil pepper piano picture pilot planet pocket potato prince puzzle queen "
    "rabbit river robot rocket salad sailor school shadow silver simple snake soldier spider "
    "spoon square station stone street summer sunset table teacher temple thunder ticket tiger "
    "tomato tower train tunnel turtle valley velvet village violin wagon walnut water whale wheel "
    "window winter wizard yellow zebra "
)
WORDS = _WORDS.split()
MONTHS = {"January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30,
          "July": 31, "August": 31, "September": 30, "October": 31, "November": 30,
          "December": 31}  # fmt: skip
UNITS = {("hours", "minutes"): 60, ("minutes", "seconds"): 60, ("metres", "centimetres"): 100,
         ("weeks", "days"): 7, ("days", "hours"): 24, ("feet", "inches"): 12,
         ("dozens", "pieces"): 12, ("yards", "feet"): 3}  # fmt: skip
PLACES = ("first", "second", "third", "last")


def story(rng: random.Random, level: int) -> Problem:
    """How many things somebody has after two to five events; the working has a line for each."""
    name, other = rng.sample(NAMES, 2)
    thing, most = rng.choice(THINGS), (12, 30, 60, 100)[level - 1]
    has = rng.randint(most // 2, most)
    told, lines = [f"{name} has {has} {thing}."], []
    for _ in range(level + 1):
        kind = rng.choice(("gets", "gives", "boxes", "doubles") if has < 300 else ("gives",))
        number, before = rng.randint(2, most), has
        if kind == "gives" and has > 2:
            number = min(number, has - 1)
            has -= number
            told.append(rng.choice((
                f"{name} gives {number} to {other}.", f"{number} of them get lost.",
                f"{other} borrows {number} of them.",
            )))  # fmt: skip
            lines.append(f"{before} - {number} = {has}")
        elif kind == "boxes":
            boxes, each = rng.randint(2, 3 + level), rng.randint(3, 5 + 2 * level)
            has += boxes * each
            told.append(rng.choice((
                f"{name} buys {boxes} boxes with {each} {thing} each.",
                f"{boxes} friends bring {each} {thing} each.",
            )))  # fmt: skip
            lines += [f"{boxes} * {each} = {boxes * each}", f"{before} + {boxes * each} = {has}"]
        elif kind == "doubles":
            has *= 2
            told.append(f"Then {name} doubles the number of {thing}.")
            lines.append(f"{before} * 2 = {has}")
        else:
            has += number
            told.append(rng.choice((
                f"{name} finds {number} more.", f"{other} gives {name} {number} {thing}.",
                f"{name} buys another {number}.",
            )))  # fmt: skip
            lines.append(f"{before} + {number} = {has}")
    told.append(f"How many {thing} does {name} have now?")
    return Problem(" ".join(told), lines, str(has))


def units(rng: random.Random, level: int) -> Problem:
    """One to three amounts in two units, added; the working converts and adds."""
    (large, small), factor = rng.choice(list(UNITS.items()))
    told, lines, total = [], [], 0
    for _ in range(max(1, level - 1)):
        many, rest = rng.randint(2, 20 + 9 * level), rng.randint(2, max(2, factor - 1))
        told.append(f"{many} {large}" + (f" and {rest} {small}" if level > 1 else ""))
        lines.append(f"{many} * {factor} = {many * factor}")
        for number in (many * factor, rest if level > 1 else 0):
            if total and number:
                lines.append(f"{total} + {number} = {total + number}")
            total += number
    asked = f"{rng.choice(NAMES)} adds up {' plus '.join(told)}. How many {small} are that?"
    return Problem(asked, lines, str(total))


def compare(rng: random.Random, level: int) -> Problem:
    """Who pays more, and how much; the working has both sums."""
    sums, told, lines = {}, [], []
    for name in rng.sample(NAMES, 2):
        parts, so_far = [], 0
        for thing in rng.sample(THINGS, level):
            many, price = rng.randint(2, 5 + level), rng.randint(2, 6 + 4 * level)
            parts.append(f"{many} {thing} at {price} coins each")
            lines.append(f"{name}: {many} * {price} = {many * price}")
            if so_far:
                lines.append(f"{so_far} + {many * price} = {so_far + many * price}")
            so_far += many * price
        told.append(f"{name} buys {' and '.join(parts)}.")
        sums[name] = so_far
    (one, a), (other, b) = sums.items()
    if a == b:
        return compare(rng, level)
    lines.append(f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")
    question = "Who pays more, and how many coins more?"
    return Problem(" ".join([*told, question]), lines, f"{one if a > b else other} {abs(a - b)}")


def clock(rng: random.Random, level: int) -> Problem:
    """The time after one to four spans, forward and from the second level on back."""
    now = rng.randrange(24 * 60)
    told, lines = [f"It is {now // 60}:{now % 60:02}."], []
    for _ in range(max(1, level - 1)):
        span = rng.randint(5, 55) + (60 * rng.randint(1, 11) if level > 1 else 0)
        hours, minutes = divmod(span, 60)
        word = f"{hours} hours and {minutes} minutes" if hours else f"{minutes} minutes"
        is_later = level == 1 or rng.random() < 0.5
        shown, sign = ("later", 1) if is_later else ("earlier", -1)
        hour, minute = now // 60 + sign * hours, now % 60 + sign * minutes
        line = f"{now // 60}:{now % 60:02} {'+' if is_later else '-'} {hours}:{minutes:02}"
        now = (now + sign * span) % (24 * 60)
        lines.append(f"{line}: {hour} hours, {minute} minutes: {now // 60}:{now % 60:02}")
        told.append(f"{'Then' if len(told) > 1 else 'Take the time'} {word} {shown}.")
    told.append("What time is it?")
    return Problem(" ".join(told), lines, f"{now // 60}:{now % 60:02}")


def date(rng: random.Random, level: int) -> Problem:
    """The date some days after another; the working goes from month to month."""
    names = list(MONTHS)
    at, span = rng.randrange(12), rng.randint(*((2, 12), (13, 30), (31, 70), (71, 150))[level - 1])
    day = rng.randint(1, MONTHS[names[at]])
    asked = f"{day} {names[at]}"
    lines = [f"{day} + {span} = {day + span}"]
    day += span
    while day > MONTHS[names[at]]:
        length = MONTHS[names[at]]
        lines.append(f"{names[at]} has {length}: {day} - {length} = {day - length}")
        day, at = day - length, (at + 1) % 12
    prompt = f"Which date is {span} days after {asked}, if February has 28 days?"
    return Problem(prompt, lines, f"{day} {names[at]}")


def letters(rng: random.Random, level: int) -> Problem:
    """Some letter of each word, joined; the working names each."""
    words = rng.sample(WORDS, level + 2)
    places = [rng.choice(PLACES[: level + 1]) for _ in words]
    if level < 3:
        places = [places[0]] * len(words)
    taken = [
        word[{"last": -1}.get(p, PLACES.index(p))] for word, p in zip(words, places, strict=True)
    ]
    asked = (f"the {p} letter of {word}" for word, p in zip(words, places, strict=True))
    if level < 3:
        asked = iter([f"the {places[0]} letter of each of these words: {', '.join(words)}"])
    lines = [", ".join(f"{word} {letter}" for word, letter in zip(words, taken, strict=True))]
    return Problem(f"Join {', '.join(asked)}.", lines, "".join(taken))


def order(rng: random.Random, level: int) -> Problem:
    """Words in the order of the alphabet, without working."""
    words = rng.sample(WORDS, (4, 6, 9, 13)[level - 1])
    return Problem(f"Sort these words from A to Z: {' '.join(words)}.", (), " ".join(sorted(words)))


MAKERS: tuple[Maker, ...] = (story, units, compare, clock, date, letters, order)
TASKS: Mapping[str, Maker] = {maker.__name__: maker for maker in MAKERS}


def reward(prompt: str, completion: str, answer: str, metadata: dict[str, object]) -> float:
    """What the run's verifier gives: 1 if the last line is the mark with the answer."""
    return pattern(prompt, completion, answer, metadata, pattern=PATTERN)


def between(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, int]]:
    """The cells in which a model is right neither too seldom nor too often.

    Args:
        found: figures by `TASK LEVEL`, as `evaluate` writes them.
    """
    rates = {name: cell["pass@1"][0] for name, cell in found.items()}
    kept = [(task, n) for task, n in cells(LEVELS, TASKS) if f"{task} {n}" in rates]
    return [(task, n) for task, n in kept if LOW <= rates[f"{task} {n}"] <= HIGH]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained-base"))
    parser.add_argument("--of", type=Path, help="a result of evaluate; without: all levels")
    parser.add_argument("--only", default=",".join(TASKS), help="kinds, with commas")
    parser.add_argument("--rows", type=int, default=9_000)
    parser.add_argument("--held-out-each", type=int, default=20, help="rows of a kind and level")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if unknown := set(only) - TASKS.keys():
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(TASKS)}")
    of = cells(LEVELS, {name: TASKS[name] for name in only})
    if args.of:
        found = between(json.loads(args.of.read_text(encoding="utf-8"))["accuracy"])
        of = [cell for cell in found if cell in of]
    if args.of and len({task for task, _ in of}) < 3:
        said = ", ".join(f"{task} {level}" for task, level in of) or "no kind"
        sys.stderr.write(
            f"{args.of}: right in {LOW:.0%} to {HIGH:.0%} of the cases is the model in {said}, not "
            "in three kinds: warm it up for more steps if it is right less often, for fewer if "
            "more, or take another model\n"
        )
        return 1
    for name, number in (("train", args.rows), ("held_out", args.held_out_each * len(of))):
        found = problems(args.seed, number, of, held_out=name == "held_out", tasks=TASKS)
        write_rows(args.out / f"{name}.jsonl", found)
    print(f"rows of {', '.join(f'{task} {level}' for task, level in of)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
