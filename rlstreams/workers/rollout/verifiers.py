"""Verifiers by configuration: named ones, user code, weighted sums."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.across import judging
from rlstreams.workers.config.nearest import meant
from rlstreams.workers.config.reward import (
    AGENT,
    ENVIRONMENT,
    JUDGE,
    JUDGE_PATIENCE_S,
    SUM,
    RewardSection,
    term_s,
)
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import Option, located, resolved
from rlstreams.workers.rollout.quick_verifiers import QUICK_VERIFIERS
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judge, Judgement, RewardError, Verifier
from rlstreams.workers.sandbox.user_code import UserCode
from rlstreams.workers.sandbox.verifier import EXTRA, UserVerifier

_IN_CHILD = Path(__file__).with_name("child_verifiers.py")
_JUDGE = Path(__file__).with_name("judge.py")


# Our verifiers that run in a child process: the package that each imports, and our extra that
# installs it.
CHILD_VERIFIERS: Mapping[str, tuple[str, str]] = {
    "pattern": ("", ""),
    "math-verify": ("math_verify", "math"),
    "reasoning-gym": ("reasoning_gym", "gym"),
    "json-schema": ("jsonschema", "json-schema"),
    JUDGE: ("", ""),
}


def verifier_of(config: RunConfig, note: Callable[[str], None]) -> Verifier:
    """The verifier of a run, whose judge may have shifts on a device.

    Args, Raises: as `make_verifier`.
    """
    verifier = make_verifier(judging(config), note)
    verifier.has_shifts = config.shared_device("judge") is not None
    return verifier


def make_verifier(section: RewardSection, note: Callable[[str], None] = lambda _: None) -> Verifier:
    """The verifier that the configuration names, ready to judge.

    Args:
        note: called with problems beside samples, for the log.

    Raises:
        ConfigError: an unknown option, a reference to a secret that is not there, a package
            that is not installed, or a file or function that cannot be loaded.
        DeadlineError: the system has no process for user code.
    """
    with ExitStack() as stack:

        def judge_of(verifier: str, options: Mapping[str, Option], field: str) -> Judge:
            values = resolved(options, f"{field} {verifier!r}, option ")
            if verifier in QUICK_VERIFIERS:
                return _quick(QUICK_VERIFIERS[verifier], values, f"{field} {verifier!r}")
            code = _user_code(section, verifier, values, field)
            # Ours would fail alike on each attempt; the judge waits for its server itself.
            attempts = 1 if verifier in CHILD_VERIFIERS else section.attempts
            user = UserVerifier(code, field, attempts=attempts, note=note)
            stack.callback(user.close)
            return user

        if section.verifier == SUM:
            judge: Judge = _Sum(
                [
                    (part.label, part.weight, judge_of(part.verifier, part.options, field))
                    for part in section.parts
                    for field in [f"reward.parts {part.label!r}"]
                ]
            )
        elif section.verifier in (ENVIRONMENT, AGENT):
            judge = _unfinished
        else:
            judge = judge_of(section.verifier, section.options, "reward.verifier")
        return Verifier(judge, require_stop=section.require_stop, close=stack.pop_all().close)


class _Sum:
    """A weighted sum. Each term's own number is a part, and so are its parts: `label/part`."""

    def __init__(self, terms: Sequence[tuple[str, float, Judge]]) -> None:
        """
        Args:
            terms: label, weight and judge of each.
        """
        self._terms = terms

    async def __call__(self, sample: AnswerToJudge) -> Judgement:
        """One term that fails fails the sum."""
        reward = 0.0
        parts: dict[str, float] = {}
        notes: list[str] = []
        for label, weight, judge in self._terms:
            try:
                judged = await judge(sample)
            except RewardError as err:
                raise RewardError(f"part {label!r}: {err}") from err
            reward += weight * judged.reward
            parts[label] = judged.reward
            parts |= {f"{label}/{name}": value for name, value in judged.parts.items()}
            notes += [f"{label}: {judged.note}"] if judged.note else []
        return Judgement(reward=reward, parts=parts, note="\n".join(notes))


async def _unfinished(_: AnswerToJudge) -> Judgement:
    """Judgement of a sample that ended before its environment, or agent, gave a number."""
    return Judgement(reward=0.0, parts={"unfinished": 1.0})


def _user_code(
    section: RewardSection, verifier: str, options: Mapping[str, Option], field: str
) -> UserCode:
    file = module = title = ""
    timeout_s = section.timeout_s
    if verifier in CHILD_VERIFIERS:
        package, extra = CHILD_VERIFIERS[verifier]
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{field} {verifier!r} needs a package that is not installed: "
                f"pip install 'rlstreams[{extra}]'"
            )
        file, function, title = str(_IN_CHILD), verifier.replace("-", "_"), verifier
        if verifier == JUDGE:
            file = str(_JUDGE)
            timeout_s, options = _judged_by(options, section, field)
    else:
        found = located(verifier)
        assert found is not None, verifier  # the section admits no other name
        file, module, function = found
    return UserCode(
        name=function,
        file=file,
        module=module,
        extra=EXTRA,
        title=title,
        options=options,
        timeout_s=timeout_s,
        memory_mb=section.memory_mb,
        processes=section.processes,
        concurrency=section.concurrency,
    )


def _judged_by(
    options: Mapping[str, Option], section: RewardSection, field: str
) -> tuple[float, dict[str, Option]]:
    """Longest time of a call of the judge, seconds, and its options.

    Raises:
        ConfigError: an option that the judge needs is missing, or names what is not there.
    """
    title = f"{field} {JUDGE!r}"
    if lacks := [name for name in ("url", "model") if not options.get(name)]:
        raise ConfigError(f"{title} needs the option {lacks[0]}, or judge.model")
    template, parse = str(options.get("template_file", "")), str(options.get("parse", ""))
    if template and not Path(template).is_file():
        raise ConfigError(f"{title}: option template_file: there is no file {template}")
    if parse and ((found := located(parse)) is None or not Path(found[0]).is_file()):
        raise ConfigError(f"{title}: option parse must be `file.py:function`, got {parse!r}")
    timed: dict[str, Option] = {"patience_s": JUDGE_PATIENCE_S, **options}
    return term_s(section, JUDGE, options), {**timed, "timeout_s": section.timeout_s}


def _quick(verifier: Callable[..., float], options: Mapping[str, Option], title: str) -> Judge:
    parameters = inspect.signature(verifier).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in defaults:
            known = f"it has: {', '.join(defaults)}{meant(name, defaults)}"
            raise ConfigError(f"{title} has no option {name!r}; {known}")
        kind = type(defaults[name])
        if not isinstance(value, (kind, int) if kind is float else kind):
            raise ConfigError(f"{title}: option {name} must be a {kind.__name__}, got {value!r}")

    async def judge(sample: AnswerToJudge) -> Judgement:
        return Judgement(reward=verifier(sample.completion, sample.answer, **options))

    return judge
