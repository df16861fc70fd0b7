"""Commands that the end of a run suggests: each works as it is printed, in the same folder."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlstreams.up.supervisor.fault_hook import Ended, Outcome
from rlstreams.workers.config.run import RunConfig

NAME = "rlstreams"
_LONGEST = 80  # of a run's id, so that there is room for the seed


def next_commands(ended: Ended) -> Sequence[str]:
    """What continues the run, what proves it, and another one like it, or what may be wrong."""
    program, options = program_name(), ended.options
    config, command, resume = options.config, options.command, options.resume
    if ended.outcome is Outcome.COMPLETE:
        resume = f"{command} --resume --steps {max(config.trainer.steps, ended.step) * 2}"
    commands = [resume, f"audit {shlex.quote(config.folder)}"]
    if ended.outcome is not Outcome.FAILED:
        commands.append(_with_another_seed(ended))
    elif command.partition(" ")[0] == "up":  # not the demo: it has no file for `doctor`
        commands.append(f"doctor{command.removeprefix('up')}")
    return [f"{program} {words}" for words in commands]


def model_lines(folder: str, step: int) -> Sequence[str]:
    """How to get at the trained model; empty while no checkpoint has any of it, or it is there."""
    if not step or not any(Path(folder, "checkpoints").glob("[0-9]*-[0-9]*")):
        return ()
    for name in ("export", f"export-{step}"):
        to = Path(folder, name)
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            named = shlex.quote(folder), shlex.quote(f"{folder}/{name}")
            return (f"model:  {program_name()} export-model {named[0]} --to {named[1]}",)
    return ()


def program_name() -> str:
    """What to type to run us: the bare name if the shell finds us under it, else the path."""
    own = Path(sys.executable).with_name(NAME)
    if not own.exists():  # Python runs us from a folder
        return f"{shlex.quote(sys.executable)} -m rlstreams"
    found = shutil.which(NAME)
    if found is not None and os.path.samefile(found, own):
        return NAME
    near = os.path.relpath(own)
    return shlex.quote(str(own) if near.startswith(os.pardir) else near)


def without(words: str, *fields: str) -> str:
    """The words without these overrides; both `--a.b=x` and `--a.b x` are such."""
    kept: list[str] = []
    rest = iter(shlex.split(words))
    for word in rest:
        name, is_set, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in fields:
            if not is_set:
                next(rest, None)
            continue
        kept.append(word)
    return shlex.join(kept)


def _with_another_seed(ended: Ended) -> str:
    options, replaced = ended.options, ["run.id", "run.seed"]
    run_id, seed, folder = _free(options.config)
    words = f"--run.id {run_id} --run.seed {seed}"
    if "{id}" not in options.config.run.dir:  # two runs need two folders
        replaced.append("run.dir")
        words += f" --run.dir {shlex.quote(folder)}"
    steps = f" --steps {options.steps_typed}" if options.steps_typed else ""
    return f"{without(options.command, *replaced)}{steps} {words}"


def _free(config: RunConfig) -> tuple[str, int, str]:
    """Id, seed and folder of a run that is not there yet."""
    for seed in itertools.count(config.run.seed + 1):
        run_id = f"{_unseeded(config.run.id)[:_LONGEST]}-seed{seed}"
        folder = config.run.dir.replace("{id}", run_id)
        if folder == config.run.dir:
            folder = f"{_unseeded(folder)}-seed{seed}"
        if not Path(folder).exists():
            break
    return run_id, seed, folder


def _unseeded(name: str) -> str:
    return re.sub(r"-seed\d+$", "", name.rstrip("/"))
