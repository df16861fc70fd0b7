"""The group `rlstreams replay`, and the options that its actions share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rlstreams.cli.options import CommandGroup, option
from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from rlstreams.cli.named import NamedRun
    from rlstreams.words.spelling import Spelling
    from rlstreams.workers.config.run import RunConfig

    Declared = Callable[[Namespace], int]

REPLAY = CommandGroup(
    "replay",
    "a recording into a fresh run; work done again, and compared; a run that goes on from a step",
    was="run",
)


def trusts(run: Declared) -> Declared:
    """Add the option that lets a recording's code run."""
    about = (
        "run also a loss and an advantage that only the recording holds: a program of its writer"
    )
    return option("--trust-code", is_flag=True, help=about)(run)


def config_of(found_run: NamedRun, *, is_trusted: bool) -> RunConfig:
    """Return the configuration of a run or a recording; print the log's problems on stderr.

    Raises ConfigError: a recording holds code that is not here, and is not trusted.
    """
    from rlstreams.debug.rerun.foreign_code import refuse_foreign_code
    from rlstreams.workers.config.load import from_json

    for problem in found_run.log.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if found_run.config is None:
        name = str(found_run.folder)
        refuse_foreign_code(found_run.log.bus, name, is_trusted=is_trusted)
    return found_run.config or from_json(json.dumps(found_run.log.configuration))


def judged_by(run: Declared) -> Declared:
    """Add the options that name another grader."""
    options = "keyword argument of whichever judges"
    run = option("--option", metavar="NAME=VALUE", multiple=True, help=options)(run)
    run = option("--verifier", metavar="NAME", help="a verifier of ours judges", default="")(run)
    return option("--reward", metavar="FILE.py:NAME", help="your function judges", default="")(run)


def spelled_for_grader(tokenizer: str, model: str, named_by: str) -> Spelling:
    """Return the spelling of answers for a grader.

    Args:
        tokenizer: folder of the tokenizer; "": the model's.
        named_by: the option that names another folder.

    Raises:
        ConfigError: there is no tokenizer; the message says which option names one.
    """
    from rlstreams.words.spelling import spelling

    spelled = spelling(tokenizer, model)
    if not spelled.hash:
        raise ConfigError(
            f"there is no tokenizer in {model or 'the model folder'}, so nobody can say what was "
            f"answered: name a folder that has it, {named_by} DIR"
        )
    return spelled
