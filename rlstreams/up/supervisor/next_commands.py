"""Commands that the end of a run suggests: each works as it is printed, in the same folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlstreams.up.supervisor.fault_hook import Ended, Outcome

NAME = "rlstreams"


def next_commands(ended: Ended) -> Sequence[str]:
    """What continues the run, what proves it, and what says why it may have failed."""
    program, options = program_name(), ended.options
    config, command, resume = options.config, options.command, options.resume
    if ended.outcome is Outcome.COMPLETE:
        resume = f"{command} --resume --steps {max(config.trainer.steps, ended.step) * 2}"
    commands = [resume, f"audit {shlex.quote(config.folder)}"]
    is_failed = ended.outcome is Outcome.FAILED
    if is_failed and command.partition(" ")[0] == "up":  # not the demo: no file for `doctor`
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
