"""`rlstreams init DIR`: creates a project that runs as is."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.options import COUNT, argument, command, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import GYM
from rlstreams.workers.config.nearest import meant_path

if TYPE_CHECKING:
    from rlstreams.check.project.start import ProjectPlan

MORE = "for more, see infra/docs/models.md, section Which GPU has which role"
DEMO, GSM8K = "demo", "gsm8k"


@command(
    "init",
    "rlstreams init sums",
    "rlstreams init x --from my.jsonl --prompt question --answer target",
    "rlstreams init sums2 --from gym:chain_sum",
    "rlstreams init math --from gsm8k --model hf:Qwen/Qwen3-0.6B",
    "rlstreams init math2 --from gsm8k --gpus 1",
    "rlstreams init solver --agent",
)
@argument("DIR", "a folder that does not exist yet")
@option(
    "--from",
    "from_",
    metavar="demo|gsm8k|gym:TASK|FILE",
    help="twenty sums, the data set openai/gsm8k, a task of reasoning-gym, "
    "or your own rows: .jsonl, .parquet or .csv",
    default="demo",
    show_default=True,
)
@option("--prompt", metavar="COLUMN", help="FILE's problem column", default="")
@option("--answer", metavar="COLUMN", help="FILE's answer column", default="")
@option(
    "--model",
    metavar="MODEL",
    help="Hugging Face folder, or hf:ORG/NAME (default: the demo's if it can write the rows)",
    default="",
)
@option(
    "--gpus",
    type=COUNT,
    help="1 or 2: write run.toml for GPUs of this machine, with vLLM",
    default=0,
    show_default=True,
)
@option(
    "--agent",
    is_flag=True,
    help="answers are what a program does that calls the model: solver.py, with its test",
)
def run(args: Namespace) -> int:
    """create a project: configuration, reward with its test, rows, README

    Writes DIR with run.toml, reward.py and its test, twenty rows and a README; with --agent also
    solver.py and its test. It runs as is: cd DIR, then `rlstreams up`.
    """
    from rlstreams.check.project.start import write

    folder = Path(args.dir)
    plan = replace(_plan(args, folder), num_gpus=args.gpus, has_agent=args.agent)
    if args.gpus > 2:
        raise ConfigError(f"--gpus must be 1 or 2, got {args.gpus}; {MORE}")
    if args.gpus and not plan.model:
        raise ConfigError("--gpus: the demo's model needs none; name one by --model hf:ORG/NAME")
    width = len("test_reward.py")
    for path in write(plan):
        print(f"{path.parent}/{path.name:<{width}}  {_ABOUT[path.name]}")
    print("\n".join(_findings(plan)))
    if args.gpus:
        print(
            "needs: vLLM, here (pip install 'rlstreams[vllm]') or where engine.python points; "
            "`rlstreams doctor` looks"
        )
    tried, whole = (
        ("minutes", "minutes a step on a CPU")
        if plan.model and not args.gpus
        else ("seconds", "minutes")
    )
    print(f"next:\n  cd {shlex.quote(str(folder))}")
    print(f"  rlstreams try    # {tried}\n  rlstreams up     # {whole}")
    return 0


_ABOUT = {
    "run.toml": "the run's configuration; every line is explained",
    "solver.py": "the agent, which calls the model",
    "test_solver.py": "checks that it asks as you intend",
    "reward.py": "the reward function",
    "test_reward.py": "checks that the reward is what you intend",
    "rows.jsonl": "the first rows, as the reward gets them",
    "README.md": "the commands",
    "model": "the demo's tiny model, 1 MB",
}


def _plan(args: Namespace, folder: Path) -> ProjectPlan:
    from rlstreams.check.project import start

    model = args.model
    if model and not model.startswith("hf:"):
        model = os.path.abspath(os.path.expanduser(model))
        if not Path(model).is_dir():
            raise ConfigError(
                f"--model: there is no folder {model!r}{meant_path(model)} "
                "(a model of the Hugging Face hub is named hf:ORG/NAME)"
            )
    if args.from_ == DEMO:
        return start.from_demo(folder, model)
    if args.from_ == GSM8K:
        return start.from_gsm8k(folder, model)
    if args.from_.startswith(GYM):
        return start.from_gym(folder, args.from_.removeprefix(GYM), model)
    return start.from_file(folder, Path(args.from_), model, args.prompt, args.answer)


def _findings(plan: ProjectPlan) -> list[str]:
    """Return lines on the columns found in the rows, and on the model."""
    columns = plan.columns.data.columns
    others = ", ".join(plan.columns.others)
    kind = "a number" if plan.columns.is_numeric else "text"
    answer = f"answer: column {columns.answer or 'answer'!r}, {kind}"
    if not plan.columns.has_answers:
        answer = "answer: none; say in reward.py what a good one is"
    lines = [
        f"problem: column {columns.prompt or 'prompt'!r}; {answer}"
        + (f"; metadata for the reward: {others}" if others else "")
    ]
    if plan.model:
        lines.append(
            f"model: {plan.model}; `rlstreams doctor` estimates its memory"
            + ("" if plan.num_gpus else ".\n  Steps take minutes on a CPU; for GPUs: --gpus 1 or 2")
        )
    else:
        lines.append(
            "model: the demo's. It was taught to add 3 to 6 numbers from 1 to 9 and learns to do "
            "it well;\n  it will hardly learn anything else: name a real model with --model "
            "hf:ORG/NAME or a folder"
        )
    return lines
