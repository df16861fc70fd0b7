"""From the configuration's `[reward]` to a verifier: named ones, user code, weighted sums."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.nearest import meant
from rlstreams.workers.config.options import Option, resolved
from rlstreams.workers.config.reward import ENVIRONMENT, SUM, RewardSection
from rlstreams.workers.rollout.judges import JUDGES
from rlstreams.workers.rollout.reward import (
    Ending,
    Judge,
    Judgement,
    Metadata,
    RewardError,
    RuleVerifier,
    Verifier,
)
from rlstreams.workers.rollout.user_verifier import Function, UserVerifier, located

_IN_CHILD = Path(__file__).with_name("child_judges.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A verifier of ours that runs in a child process."""

    function: str
    package: str = ""  # that it needs, as it is imported
    extra: str = ""  # of ours that installs it


CHILD_JUDGES: Mapping[str, _Named] = {
    "pattern": _Named(function="pattern"),
    "math-verify": _Named(function="math_verify", package="math_verify", extra="math"),
    "reasoning-gym": _Named(function="reasoning_gym", package="reasoning_gym", extra="gym"),
    "json-schema": _Named(function="json_schema", package="jsonschema", extra="json-schema"),
}


def make_verifier(section: RewardSection) -> Verifier:
    """The verifier that the configuration names, ready to judge.

    Raises:
        ConfigError: an unknown name or option, a reference to a secret that is not there, a package
            that is not installed, or a file or function that cannot be loaded.
    """
    with ExitStack() as stack:
        maker = _Maker(section, stack.callback)
        if section.verifier == SUM:
            judge: Judge = _Sum(
                [
                    _Term(
                        label=part.label,
                        weight=part.weight,
                        judge=maker.judge(
                            part.verifier, part.options, f"reward.parts {part.label!r}"
                        ),
                    )
                    for part in section.parts
                ]
            )
        elif section.verifier == ENVIRONMENT:
            judge = _unfinished
        else:
            judge = maker.judge(section.verifier, section.options, "reward.verifier")
        close = stack.pop_all().close
    return RuleVerifier(
        judge, require_stop=section.require_stop, waits=maker.num_users > 0, close=close
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    label: str
    weight: float
    judge: Judge


class _Sum:
    """A weighted sum. Each term's own number is a part, and so are its parts: `label/part`."""

    def __init__(self, terms: Sequence[_Term]) -> None:
        self._terms = terms

    def __call__(
        self, prompt: str, completion: str, answer: str, metadata: Metadata, ending: Ending
    ) -> Judgement:
        """See `Verifier.judge`; one term that fails fails the sum."""
        reward = 0.0
        parts: dict[str, float] = {}
        for term in self._terms:
            try:
                judged = term.judge(prompt, completion, answer, metadata, ending)
            except RewardError as err:
                raise RewardError(f"part {term.label!r}: {err}") from err
            reward += term.weight * judged.reward
            parts[term.label] = judged.reward
            parts |= {f"{term.label}/{name}": value for name, value in judged.parts.items()}
        return Judgement(reward=reward, parts=parts)


def _unfinished(*_: object) -> Judgement:
    """Of a sample that ended before its environment gave a number."""
    return Judgement(reward=0.0, parts={"unfinished": 1.0})


class _Maker:
    """Makes judges, and sees to it that they are closed."""

    def __init__(self, section: RewardSection, on_close: Callable[..., object]) -> None:
        self._section = section
        self._on_close = on_close
        self.num_users = 0  # judges made that run in a process of their own

    def judge(self, verifier: str, options: Mapping[str, Option], field: str) -> Judge:
        values = resolved(options, f"{field} {verifier!r}, option ")
        if verifier in JUDGES:
            return _with_options(JUDGES[verifier], values, f"{field} {verifier!r}")
        user = UserVerifier(self._function(verifier, values, field), field)
        self._on_close(user.close)
        self.num_users += 1
        return user

    def _function(self, verifier: str, options: Mapping[str, Option], field: str) -> Function:
        file = module = title = ""
        if verifier in CHILD_JUDGES:
            named = CHILD_JUDGES[verifier]
            _check_installed(named, f"{field} {verifier!r}")
            file, function, title = str(_IN_CHILD), named.function, verifier
        elif (found := located(verifier)) is not None:
            file, module, function = found
        else:
            known = [*JUDGES, *CHILD_JUDGES, SUM, ENVIRONMENT]
            half = "; name its function too" if verifier.endswith(".py") else ""
            raise ConfigError(
                f"{field} must be one of {', '.join(known)}, or `file.py:function` or "
                f"`module:function`, got {verifier!r}{half or meant(verifier, known)}"
            )
        return Function(
            # What is ours computes: it would fail alike.
            attempts=1 if verifier in CHILD_JUDGES else self._section.attempts,
            name=function,
            file=file,
            module=module,
            title=title,
            options=options,
            timeout_s=self._section.timeout_s,
            memory_mb=self._section.memory_mb,
            processes=self._section.processes,
            concurrency=self._section.concurrency,
        )


def _with_options(
    judge: Callable[..., Judgement], options: Mapping[str, Option], title: str
) -> Judge:
    parameters = inspect.signature(judge).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in defaults:
            known = f"it has: {', '.join(defaults)}{meant(name, defaults)}"
            raise ConfigError(f"{title} has no option {name!r}; {known}")
        kind = type(defaults[name])
        if not isinstance(value, (kind, int) if kind is float else kind):
            raise ConfigError(f"{title}: option {name} must be a {kind.__name__}, got {value!r}")

    def judged(
        prompt: str, completion: str, answer: str, metadata: Metadata, _ending: Ending
    ) -> Judgement:
        return judge(prompt, completion, answer, metadata, **options)

    return judged


def _check_installed(named: _Named, title: str) -> None:
    if named.package and importlib.util.find_spec(named.package) is None:
        raise ConfigError(
            f"{title} needs a package that is not installed: pip install 'rlstreams[{named.extra}]'"
        )
