"""The command that starts a server so that rlstreams can drive it.

Arguments that the guarantees need cannot be overridden: a user's argument that contradicts one is
refused by name. All others are passed on as they stand in `[engine.args]`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlstreams.workers.engines.served.adapter import Value
from rlstreams.workers.engines.served.adapters import ADAPTERS
from rlstreams.workers.engines.served.facts import Kind, to_install
from rlstreams.workers.model.base import EngineError

ASK_S = 30.0
_QUESTION = """
import importlib.metadata as m, importlib.util, json, sys
kind, *names = sys.argv[1:]
for name in names:
    try:
        spec = importlib.util.find_spec(kind)
        print(json.dumps([name, m.version(name), spec.origin or "" if spec else ""]))
        break
    except m.PackageNotFoundError:
        pass
else:
    print("[]")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """Program and arguments to run, and environment variables beside the usual ones.

    A value `env:NAME` or `file:PATH` is a reference to a secret, and printed as one.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    library: str = ""  # `__init__.py` of the server's library, if it is known

    def shell(self) -> str:
        """Text for a POSIX shell, one argument a line."""
        lines = [f"{name}={_shell_value(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([*lines, *_lines(self.argv)])

    def docker(self, image: str) -> str:
        """`docker run` with the host's network: control routes stay on its loopback."""
        options = [f"-e {name}={_shell_value(v)}" for name, v in self.environment.items()]
        head = ["docker run --rm --gpus all --network host --ipc host", *options]
        return " \\\n  ".join(
            [*head, f"--entrypoint {self.argv[0]} {image}", *_lines(self.argv[1:])]
        )

    def kubernetes(self, image: str) -> str:
        """A container of a pod, as YAML (JSON strings are YAML)."""
        env = [_kubernetes_value(name, value) for name, value in self.environment.items()]
        rows = [
            "containers:",
            "  - name: engine",
            f"    image: {image}",
            f"    command: {json.dumps([self.argv[0]])}",
            "    args:",
            *(f"      - {json.dumps(word)}" for word in self.argv[1:]),
            "    env:",
            *(f"      - {json.dumps(row)}" for row in env),
        ]
        return "\n".join(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """Facts that a start command depends on."""

    kind: Kind
    version: str
    python: str
    model: str
    host: str
    port: int
    limit: int
    capture_experts: bool
    load: str  # "dummy" or "auto"
    log_level: str
    sleeps: bool  # it is to give its memory up on demand
    is_asked: bool  # it must report its load
    plugin: Mapping[str, str]  # environment that brings our plugin in; empty: it is installed
    args: Mapping[str, Value]
    environment: Mapping[str, str]
    library: str = ""  # `Installed.library`


class Installed(NamedTuple):
    """The distribution that a Python would run as a server."""

    distribution: str
    version: str
    library: str  # `__init__.py` of its package; empty: not found


def start_command(start: StartFacts) -> StartCommand:
    """The whole start command.

    Raises:
        EngineError: an argument of the user's contradicts one of ours; names both.
    """
    own, ours = ADAPTERS[start.kind].start, _args(start)
    defaults: dict[str, Value] = {own.limit: start.limit, own.log_level: start.log_level}
    defaults |= own.reports_load if start.is_asked else {}
    theirs = {name.lstrip("-").replace("_", "-"): value for name, value in start.args.items()}
    _refuse_clash(ours, theirs, "engine.args")
    words = _words({**defaults, **theirs, **ours})
    own_environment = _environment(start)
    _refuse_clash(own_environment, start.environment, "engine.env")
    return StartCommand(
        argv=(start.python, "-m", own.module, *words),
        environment={**start.environment, **own_environment},
        library=start.library,
    )


def judge_command(
    kind: Kind,
    python: str,
    *,
    model: str,
    name: str,
    address: tuple[str, int],
    log_level: str,
    sleeps: bool,
    args: Mapping[str, Value],
) -> StartCommand:
    """Command of a server of a fixed model, which answers chat completions and gets no weights.

    Args:
        name: of the model in requests.
        sleeps: it is to give its memory up on demand; vLLM alone.

    Raises:
        EngineError: an argument of the user's contradicts one of ours.
    """
    host, port = address
    own = ADAPTERS[kind].start
    ours: dict[str, Value] = {"host": host, "port": port, "served-model-name": name}
    ours[own.model] = model
    environment = dict(own.environment)
    if sleeps:
        ours |= own.sleeps
        environment |= own.control  # has the routes of sleep
    theirs = {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}
    _refuse_clash(ours, theirs, "judge.args")
    words = _words({own.log_level: log_level, **theirs, **ours})
    return StartCommand(argv=(python, "-m", own.module, *words), environment=environment)


def _args(start: StartFacts) -> dict[str, Value]:
    adapter = ADAPTERS[start.kind]
    args: dict[str, Value] = {
        "host": start.host,
        "port": start.port,
        adapter.start.model: start.model,
        "load-format": start.load,
        "skip-tokenizer-init": True,
    }
    if start.capture_experts:
        args["enable-return-routed-experts"] = True
    args |= adapter.answer_args(start.version)
    args |= adapter.start.sleeps if start.sleeps else {}
    return {**args, **adapter.start.plugin}


def _environment(start: StartFacts) -> dict[str, str]:
    own = ADAPTERS[start.kind].start
    log = {own.log_variable: start.log_level.upper()} if own.log_variable else {}
    return {**own.environment, **own.control, **log, "NCCL_CUMEM_ENABLE": "0", **start.plugin}


def _shell_value(value: str) -> str:
    kind, _, name = value.partition(":")
    if kind == "env":
        return f'"${name}"'
    return f'"$(cat {shlex.quote(name)})"' if kind == "file" else shlex.quote(value)


def _kubernetes_value(name: str, value: str) -> dict[str, object]:
    if value.partition(":")[0] in ("env", "file"):
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": "rlstreams", "key": name}}}
    return {"name": name, "value": value}


def _refuse_clash(ours: Mapping[str, Value], theirs: Mapping[str, Value], what: str) -> None:
    for name in sorted(set(ours) & set(theirs)):
        if str(ours[name]).lower() != str(theirs[name]).lower():
            raise EngineError(
                f"{what}.{name} is {theirs[name]!r}, but rlstreams needs {ours[name]!r}: remove it"
            )


def _words(args: Mapping[str, Value]) -> list[str]:
    words: list[str] = []
    for name, value in args.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words


def _lines(argv: tuple[str, ...]) -> list[str]:
    """Arguments by line: an option and its value stay on one line."""
    lines: list[str] = []
    for word in argv:
        is_option = bool(lines) and lines[-1].startswith("-") and " " not in lines[-1]
        if is_option and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return lines


def installed_server(kind: Kind, python: str) -> Installed:
    """The distribution that `python` would run as `kind`, asked without importing it (that takes
    20 s).

    Raises:
        EngineError: no such Python, or it does not have the server; gives the cure.
    """
    found = _ask(python, (kind, *ADAPTERS[kind].start.distributions))
    if not found:
        raise EngineError(
            f"engine.python: {python} has no {kind}: install it there ({python} -m pip install "
            f"{to_install(kind)}), or name the Python that has it, or give engine.urls of running "
            "servers"
        )
    return Installed(*found)


def _ask(python: str, words: tuple[str, ...]) -> list[str]:
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, *words],
            capture_output=True,
            timeout=ASK_S,
            check=True,
            text=True,
        )
        found: list[str] = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        raise EngineError(
            f"engine.python: {python} cannot be asked what it has: {_why(err)}; name the Python "
            "executable of the server's environment"
        ) from err
    return found


def _why(err: Exception) -> str:
    """Reason of a failure, without the many lines of the question."""
    if isinstance(err, subprocess.CalledProcessError):
        lines = str(err.stderr).strip().splitlines()
        return f"it ended with status {err.returncode}" + (f": {lines[-1]}" if lines else "")
    if isinstance(err, subprocess.TimeoutExpired):
        return f"no answer within {ASK_S:g} s"
    if isinstance(err, OSError):
        return err.strerror or str(err)
    return "it does not answer as a Python does"
