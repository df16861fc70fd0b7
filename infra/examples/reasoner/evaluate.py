"""Accuracy of a Hugging Face folder on held-out problems, by task and level: pass@1 and pass@k.

    python -m infra.examples.reasoner.evaluate --model runs/reasoner-base/model --out base.json

`--tasks MODULE` takes the tasks of another example, which has TASKS, LEVELS and `reward` too; with
`--shots N` so many solved problems of the same task and level stand before each.

Answers are sampled at temperature 1 by the library's `generate`, a level after another, and may be
twice as long as the level's longest solution; without its end an answer earns nothing. Rows are
the same for every model. pass@1 is the mean over `--samples` answers a problem, pass@k the share
of problems with a right one among them, each with its 95 % interval (bootstrap over problems).
`mixed`: share of problems with right and wrong answers; `worked`: of answers with working; `cut`:
of answers without end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Caches grow with every token: blocks that cannot grow would fill the GPU.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.examples.reasoner.tasks import MARK, Problem, cells, problems

TASKS = "infra.examples.reasoner.tasks"
SEED = 0  # of sampling and of the rows: with levels 3,4,5 and --rows 20 those of `held_out.jsonl`
RESAMPLED = 1000
AT_ONCE = 1536  # answers


class Sampler:
    """A model and its tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        self._model, self._args = model.to(args.device).eval(), args
        torch.manual_seed(SEED)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each."""
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    @torch.inference_mode()
    def answers(self, chats: Sequence[list[dict[str, str]]], most: int) -> list[list[str]]:
        """As many texts for each chat as are asked for, end token included."""
        given = self.tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self._model.device)
        number = self._args.samples
        ids_BT = self._model.generate(
            **given, do_sample=True, top_k=0, max_new_tokens=most, num_return_sequences=number
        )
        texts = self.tokenizer.batch_decode(ids_BT[:, given["input_ids"].shape[1] :])
        return np.reshape(np.array(texts, dtype=object), (len(chats), -1)).tolist()

    def chat(self, task: str, level: int, problem: Problem) -> list[dict[str, str]]:
        """The problem, behind others with their solutions if these are asked for."""
        shown, of = self._args.shots, [(task, level)]
        tasks = self._args.tasks.TASKS
        solved = [p for *_, p in problems(SEED, shown, of, held_out=False, tasks=tasks)]
        pairs = [(one.prompt, one.solution()) for one in solved] + [(problem.prompt, "")]
        said = [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
        return [{"role": role, "content": text} for role, text in said[:-1]]

    def judged(self, rows: Sequence[tuple[str, int, Problem]]) -> list[dict[str, Any]]:
        """What the answers to each row earned, and how they look."""
        longest = max(self.lengths([problem.solution() for *_, problem in rows]))
        most, end = min(self._args.max_new_tokens, 2 * longest), self.tokenizer.eos_token
        at_once, found = max(1, AT_ONCE // self._args.samples), []
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            answers = self.answers([self.chat(*row) for row in some], most)
            for (task, level, problem), whole in zip(some, answers, strict=True):
                cut = [end not in text for text in whole]
                texts, of = [text.split(end)[0] for text in whole], {"task": task}
                earned = [
                    self._args.tasks.reward(problem.prompt, text, problem.answer, of)
                    for text in texts
                ]
                told = {
                    "rewards": np.where(cut, 0.0, earned),
                    "worked": np.mean([not text.startswith(MARK) for text in texts]),
                    "cut": np.mean(cut),
                    "tokens": np.mean(self.lengths(texts)),
                }
                first = {"prompt": problem.prompt, "wanted": problem.answer, "said": texts[0]}
                found.append({"task": task, "level": level} | told | first)
        return found


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of some rows: accuracies with their intervals, and means."""
    rewards_RS = np.array([row["rewards"] for row in rows])
    drawn = np.random.default_rng(0).integers(len(rows), size=(RESAMPLED, len(rows)))

    def interval(values_R: np.ndarray) -> list[float]:
        low, high = np.percentile(values_R[drawn].mean(1), [2.5, 97.5])
        return [round(float(value), 4) for value in (values_R.mean(), low, high)]

    means = {name: np.mean([row[name] for row in rows]) for name in ("worked", "cut", "tokens")}
    means["mixed"] = np.mean((rewards_RS.max(1) > 0) & (rewards_RS.min(1) < 1))
    return {
        "problems": len(rows),
        "pass@1": interval(rewards_RS.mean(1)),
        "pass@k": interval(rewards_RS.max(1)),
        **{name: round(float(value), 4) for name, value in means.items()},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures by task and level; `all 3` is of level 3."""
    return {
        f"{task} {n}": figures([r for r in rows if r["level"] == n and task in (r["task"], "all")])
        for task in (*dict.fromkeys(row["task"] for row in rows), "all")
        for n in sorted({row["level"] for row in rows})
    }


def shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the first row of each task and level: what was asked and said, and what it earned."""
    first = {(row["task"], row["level"]): row for row in reversed(rows)}
    names = ("task", "level", "prompt", "wanted", "said")
    return [
        {name: row[name] for name in names} | {"reward": float(row["rewards"][0])}
        for row in reversed(first.values())
    ]


def table(found: dict[str, dict[str, Any]]) -> str:
    """pass@1 (pass@k) by task and level, then what all tasks of a level have in common."""
    levels = [name.split()[1] for name in found if name.startswith("all")]
    lines = [f"{'level':10}" + "".join(f"{level:>14}" for level in levels)]
    for task in dict.fromkeys(name.split()[0] for name in found):
        own = [(found[f"{task} {n}"]["pass@1"], found[f"{task} {n}"]["pass@k"]) for n in levels]
        lines.append(f"{task:10}" + "".join(f"{a[0]:7.2f} ({b[0]:.2f})" for a, b in own))
    for name in ("mixed", "worked", "cut", "tokens"):
        lines.append(f"{name:10}" + "".join(f"{found[f'all {n}'][name]:14.2f}" for n in levels))
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=importlib.import_module, default=TASKS, help="a module")
    parser.add_argument("--levels", default="", help="1,2: empty, all of them")
    parser.add_argument("--rows", type=int, default=20, help="of each task and level")
    parser.add_argument("--samples", type=int, default=8, help="answers a problem")
    parser.add_argument("--shots", type=int, default=0, help="solved problems before each")
    parser.add_argument("--max-new-tokens", type=int, default=768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample, judge; the table after each level."""
    args, started_s = parse(argv), time.monotonic()
    tasks, words = args.tasks.TASKS, args.levels.split(",") if args.levels else args.tasks.LEVELS
    sampler, levels = Sampler(args), [int(level) for level in words]
    of = cells(levels, tasks)
    rows = list(problems(SEED, len(of) * args.rows, of, held_out=True, tasks=tasks))
    judged: list[dict[str, Any]] = []
    for level in levels:
        judged += sampler.judged([row for row in rows if row[1] == level])
        found = summary(judged)
        seconds = round(time.monotonic() - started_s, 1)
        print(f"{table(found)}\n{len(judged) * args.samples:,} answers in {seconds} s", flush=True)
        told = {"model": args.model.name, "seconds": seconds, "accuracy": found}
        told["answers"] = shown(judged)
        if args.out:
            args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
