"""What all actions of `rlstreams replay` share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rlstreams.cli.options import Group, option
from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from rlstreams.cli.named import NamedRun
    from rlstreams.words.spelling import Spelling
    from rlstreams.workers.config.run import RunConfig

    Declared = Callable[[Namespace], int]

REPLAY = Group(
    "replay",
    "a recording into a fresh run; work done again, and compared; a run that goes on from a step",
    was="run",
)


def config_of(found_run: NamedRun) -> RunConfig:
    """Of a run or a recording; what is wrong with that is said."""
    from rlstreams.workers.config.load import from_json

    for problem in found_run.log.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return found_run.config or from_json(json.dumps(found_run.log.configuration))


def judged_by(run: Declared) -> Declared:
    """Options of a command that has another grader judge."""
    options = "keyword argument of whichever judges"
    run = option("--option", metavar="NAME=VALUE", multiple=True, help=options)(run)
    run = option("--verifier", metavar="NAME", help="a verifier of ours judges", default="")(run)
    return option("--reward", metavar="FILE.py:NAME", help="your function judges", default="")(run)


def spelled_for_grader(tokenizer: str, model: str, named_by: str) -> Spelling:
    """How answers become text.

    Args:
        tokenizer: the folder that has it; empty: that of the model.
        named_by: the option that names another one.

    Raises:
        ConfigError: nobody can say what was answered; says what to name.
    """
    from rlstreams.words.spelling import spelling

    spelled = spelling(tokenizer, model)
    if not spelled.hash:
        raise ConfigError(
            f"there is no tokenizer in {model or 'the model folder'}, so nobody can say what was "
            f"answered: name a folder that has it, {named_by} DIR"
        )
    return spelled
