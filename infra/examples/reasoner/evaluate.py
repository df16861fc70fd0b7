"""Accuracy of a Hugging Face folder on held-out problems, by task and level: pass@1 and pass@k.

    python -m infra.examples.reasoner.evaluate --model runs/reasoner-base/model --out base.json

Answers are sampled at temperature 1 by the library's own `generate`, a level after another, and may
be twice as long as the level's longest solution; the rows are the same for every model. pass@1 is
the mean over `--samples` answers a problem, pass@k the share of problems with a right one among
them. Intervals: 95 %, bootstrap over problems.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Caches grow with every token: blocks that cannot grow would fill the GPU.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.examples.reasoner.tasks import LEVELS, MARK, TASKS, Problem, problems, reward

SEED = 0  # of the rows: with levels 3,4,5 and --rows 20 those of `held_out.jsonl`
RESAMPLED = 1000


class Judged(NamedTuple):
    """A problem and what its answers earned."""

    task: str
    level: int
    rewards: Sequence[float]
    tokens: Sequence[int]
    worked: int  # answers with more lines than the last
    cut: int


def answers_of(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, samples: int, most: int, heat: float
) -> list[list[str]]:
    """`samples` texts for each prompt, end token included where there is one."""
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    given = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    given = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
    sampled = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        ids_BT = model.generate(
            **given,
            **(sampled if heat else {"do_sample": False}),
            max_new_tokens=most,
            num_return_sequences=samples,
        )
    texts = tokenizer.batch_decode(ids_BT[:, given["input_ids"].shape[1] :])
    return [texts[at : at + samples] for at in range(0, len(texts), samples)]


def judged(
    rows: Sequence[tuple[str, int, Problem]],
    answer: Callable[[Sequence[str]], list[list[str]]],
    tokenizer: Any,
    at_once: int,
) -> Iterator[Judged]:
    """Every row, `at_once` in a batch. An answer without its end earns nothing."""
    end = tokenizer.eos_token
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        all_texts = answer([problem.prompt for *_, problem in some])
        for (task, level, problem), given in zip(some, all_texts, strict=True):
            texts = [text.split(end)[0] for text in given]
            has_end = [end in text for text in given]
            earned = [reward(problem.prompt, t, problem.answer, {"task": task}) for t in texts]
            yield Judged(
                task,
                level,
                [value * is_whole for value, is_whole in zip(earned, has_end, strict=True)],
                [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]],
                sum(not text.startswith(MARK) for text in texts),
                has_end.count(False),
            )


def figures(rows: Sequence[Judged]) -> dict[str, Any]:
    """Accuracies of some rows, each with its interval."""
    rewards_RS = np.array([row.rewards for row in rows])
    drawn = np.random.default_rng(0).integers(len(rows), size=(RESAMPLED, len(rows)))

    def interval(values_R: np.ndarray) -> list[float]:
        low, high = np.percentile(values_R[drawn].mean(1), [2.5, 97.5])
        return [round(float(value), 4) for value in (values_R.mean(), low, high)]

    answers = rewards_RS.size
    return {
        "pass@1": interval(rewards_RS.mean(1)),
        f"pass@{rewards_RS.shape[1]}": interval(rewards_RS.max(1)),
        "mixed": round(float(np.mean((rewards_RS.max(1) > 0) & (rewards_RS.min(1) < 1))), 4),
        "worked": round(sum(row.worked for row in rows) / answers, 4),
        "cut": round(sum(row.cut for row in rows) / answers, 4),
        "tokens": round(float(np.mean([row.tokens for row in rows])), 1),
        "problems": len(rows),
    }


def summary(rows: Sequence[Judged]) -> dict[str, Any]:
    """By level, and by task and level."""
    levels = sorted({row.level for row in rows})
    tasks = [task for task in TASKS if any(row.task == task for row in rows)]
    return {
        "levels": {str(n): figures([row for row in rows if row.level == n]) for n in levels},
        "tasks": {
            f"{task} {n}": figures([row for row in rows if (row.task, row.level) == (task, n)])
            for task in tasks
            for n in levels
        },
    }


def table(found: dict[str, Any]) -> str:
    """pass@1 (pass@k) by task and level; a row more for what all tasks have in common."""
    levels = list(found["levels"])
    tasks = list(dict.fromkeys(name.split()[0] for name in found["tasks"]))
    lines = [f"{'':10}" + "".join(f"{'level ' + n:>16}" for n in levels)]
    for task in tasks:
        cells = [found["tasks"][f"{task} {n}"] for n in levels]
        lines.append(f"{task:10}" + "".join(_cell(cell) for cell in cells))
    lines.append(f"{'all':10}" + "".join(_cell(cell) for cell in found["levels"].values()))
    for name in ("mixed", "worked", "cut", "tokens"):
        cells = [f"{cell[name]:>16}" for cell in found["levels"].values()]
        lines.append(f"{name:10}" + "".join(cells))
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    one, *others = (value[0] for name, value in cell.items() if name.startswith("pass@"))
    return f"{one:.2f} ({others[-1] if others else one:.2f})".rjust(16)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)))
    parser.add_argument("--rows", type=int, default=20, help="of each task and level")
    parser.add_argument("--samples", type=int, default=8, help="answers a problem")
    parser.add_argument("--max-new-tokens", type=int, default=768)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--at-once", type=int, default=1536, help="answers sampled together")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample, judge, print the table."""
    args, started_s = parse(argv), time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    torch.manual_seed(args.seed)
    levels = [int(level) for level in args.levels.split(",")]
    number = len(TASKS) * len(levels) * args.rows
    rows = list(problems(SEED, number, levels, held_out=True))
    samples = args.samples if args.temperature else 1
    done: list[Judged] = []
    for level in levels:
        own = [row for row in rows if row[1] == level]
        longest = max(len(tokenizer(problem.solution())["input_ids"]) for *_, problem in own)
        answer = functools.partial(
            answers_of,
            model,
            tokenizer,
            samples=samples,
            most=min(args.max_new_tokens, 2 * longest),
            heat=args.temperature,
        )
        done += judged(own, answer, tokenizer, max(1, args.at_once // samples))
        seconds = round(time.monotonic() - started_s, 1)
        found = {"model": str(args.model), "seconds": seconds} | summary(done)
        print(f"{table(found)}\n{len(done) * samples:,} answers in {seconds:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
