"""A short supervised warm-up on worked solutions: a base model learns the form of an answer.

    python -m infra.examples.pretrained.warm_up --out runs/pretrained-base/model    # a GPU: seconds
    python -m infra.examples.pretrained.warm_up --model hf:Qwen/Qwen3-0.6B --out runs/other/model
    python -m infra.examples.pretrained.warm_up --calculator --out runs/pretrained-agent-base/model

A model without a chat template gets the one beside this file. With `--calculator` solutions are
dialogues as `solver.py` holds them, and the template is theirs. Loss is on what the model says,
with the end of each turn, alone. No problem is one of the held-out ones or, but for chance, of a
run's rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.examples.pretrained.solver import calculated
from infra.examples.pretrained.tasks import LEVELS, TASKS
from infra.examples.reasoner.tasks import Problem, cells, problems
from rlstreams.workers.config.hub import model_folder

TEMPLATE = Path(__file__).with_name("template.jinja")
OF_DIALOGUES = Path(__file__).with_name("calculator.jinja")
SEED = 1000  # of the problems: a run's rows have others
LR, WARMUP_SHARE, BETAS, MAX_NORM = 5e-5, 0.1, (0.9, 0.99), 1.0
SHOW_EVERY = 10
UNSEEN = -100  # a target without loss


def dialogue(problem: Problem, *, is_asking: bool) -> list[dict[str, str]]:
    """The messages of a worked solution; `is_asking`: sums of its lines are the calculator's."""
    said, messages = list[str](), [{"role": "user", "content": problem.prompt}]
    for line in problem.solution().split("\n") if is_asking else ():
        asked, _, result = line.rpartition(" ")
        said.append(asked if calculated(asked) == result else line)
        if said[-1] == asked:
            messages.append({"role": "assistant", "content": "\n".join(said)})
            messages.append({"role": "user", "content": result})
            said = []
    last = "\n".join(said) if is_asking else problem.solution()
    return [*messages, {"role": "assistant", "content": last}]


def demonstration(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[list[int]]:
    """Tokens of a dialogue in turn: what comes before an answer, the answer with its end.

    Raises:
        SystemExit: the chat template writes another text before an answer than it asks with.
    """
    texts, end = list[str](), tokenizer.eos_token
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        done = "".join(texts)
        prompt = tokenizer.apply_chat_template(
            messages[:at], tokenize=False, add_generation_prompt=True
        )
        whole = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
        is_fit = prompt.startswith(done) and whole.startswith(prompt)
        if not is_fit or end not in whole[len(prompt) :]:
            raise SystemExit(
                f"the chat template's {whole!r} does not continue {prompt!r} up to {end!r}: name a "
                "template that does, --template"
            )
        texts += [prompt[len(done) :], whole[len(prompt) :].partition(end)[0] + end]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def batches(tokenizer: Any, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of each step ids, mask and targets, [B, T]."""
    cell = cells(LEVELS, TASKS)
    drawn = problems(SEED, args.steps * args.batch, cell, held_out=False, tasks=TASKS)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for _ in range(args.steps):
        rows, targets = list[list[int]](), list[list[int]]()
        for _ in range(args.batch):
            messages = dialogue(next(drawn)[2], is_asking=args.calculator)
            pieces = demonstration(tokenizer, messages)
            rows.append([token for piece in pieces for token in piece])
            targets.append([
                token if number % 2 else UNSEEN
                for number, piece in enumerate(pieces) for token in piece
            ])  # fmt: skip
        longest = max(map(len, rows))
        yield (
            torch.tensor([row + [pad] * (longest - len(row)) for row in rows]),
            torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
            torch.tensor([row + [UNSEEN] * (longest - len(row)) for row in targets]),
        )


def learning_rate(step: int, steps: int) -> float:
    """Of steps from 0: linear up over the first tenth, then a cosine down to 0."""
    rising = max(1.0, WARMUP_SHARE * steps)
    return LR * min(1.0, (step + 1) / rising) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All steps; figures. Weights are float32, passes on a GPU bfloat16."""
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    started_s, losses, device = time.monotonic(), list[float](), args.device
    for step, batch in enumerate(batches(tokenizer, args)):
        seen = int((batch[2][:, 1:] != UNSEEN).sum())
        total = 0.0
        for at in range(0, args.batch, args.micro):
            ids_BT, mask_BT, targets_BT = (rows[at : at + args.micro].to(device) for rows in batch)
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
                logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits_BTV[:, :-1].float().flatten(0, 1), targets_BT[:, 1:].flatten(),
                ignore_index=UNSEEN, reduction="sum",
            ) / seen  # fmt: skip
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        adam.step()
        adam.zero_grad(set_to_none=True)
        losses.append(round(total, 4))
        if step % SHOW_EVERY == 0 or step == args.steps - 1:
            print(f"step {step + 1}/{args.steps}  loss {total:.4f}", flush=True)
    seconds = round(time.monotonic() - started_s, 1)
    return {"steps": args.steps, "examples": args.steps * args.batch, "lr": LR,
            "seconds": seconds, "losses": losses}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="runs/pretrained-base/gemma", help="or hf:ORG/NAME")
    parser.add_argument("--out", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--template", type=Path, help="instead of the model's own")
    parser.add_argument("--calculator", action="store_true", help="dialogues of the agent's")
    parser.add_argument("--steps", type=int, default=100, help="0: the template alone")
    parser.add_argument("--batch", type=int, default=64, help="solutions of a step")
    parser.add_argument("--micro", type=int, default=16, help="that are computed at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, train, write."""
    args = parse(argv)
    folder = model_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = args.template or (OF_DIALOGUES if args.calculator else None)
    if template or not tokenizer.chat_template:
        tokenizer.chat_template = (template or TEMPLATE).read_text(encoding="utf-8").strip()
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device)
    figures = {"model": args.model} | train(model.train(), tokenizer, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "warm_up.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
