"""The user's loss, advantage and optimizer, called with made-up numbers before a run starts.

A process of its own does it: it imports torch, and code that hangs or ends its process costs no
start.

    python -m rlstreams.check.doctor.own_code CONFIG ANSWER
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rlstreams.check.doctor.check import Check, ok, warn
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.workers.config.load import read_json, resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.agreement import own_code

LIMIT_S = 120.0  # of importing torch, loading the code, and two calls


def own_code_check(config: RunConfig, limit_s: float = LIMIT_S) -> Check | None:
    """Call the user's functions that train twice; None: all are ours.

    Raises:
        ConfigError: one cannot be loaded, raised, gave a wrong shape, no finite number, no
            gradient or two results that differ; or its process hung or died.
    """
    named = [field for field, *_ in config.trainer.own()]
    if not named:
        return None
    own_code(config)  # raises at once where there is no file
    with tempfile.TemporaryDirectory(prefix="rlstreams-own-") as place:
        given, answer = Path(place) / "config.json", Path(place) / "answer.json"
        given.write_text(resolved_json(config), encoding="utf-8")
        # -P: a file of the run's folder that is named like one of Python's is not taken for it.
        argv = [sys.executable, "-P", "-m", "rlstreams.check.doctor.own_code", str(given)]
        argv.append(str(answer))
        child = Child.started(argv, orphaned=Orphaned.DIES, log=Path(place) / "log")
        try:
            is_done = child.wait(limit_s)
        finally:
            child.end()
        tried = f"{' and '.join(named)}: loaded, and called with made-up numbers,"
        if not is_done:
            raise ConfigError(f"{tried} it did not come back within {limit_s:g} s")
        if not answer.is_file():
            raise ConfigError(f"{tried} its process {child.cause() or 'ended'}")
        said = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in said:
        raise ConfigError(said["error"])
    if said["unweighted"]:
        return warn("loss", said["unweighted"], 'multiply by it, or set both to "none"')
    return ok("loss", "; ".join(said["lines"]))


def _main(given: str, answer: str) -> None:
    from rlstreams.workers.trainer.training.made_up import made_up, unweighted

    config = read_json(Path(given))
    parts = [part.label for part in config.reward.parts]
    try:
        by, code = config.trainer, own_code(config)
        lines = made_up(by, config.prompts.group_size, parts, code)
        said: dict[str, object] = {"lines": lines, "unweighted": unweighted(by.loss, code)}
    except StreamsError as err:
        said = {"error": str(err)}
    Path(answer).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
