"""The sections of a configuration about user code: rewards, and environments of several turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.checks import (
    Ipv4,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlstreams.workers.config.engine import VISIBLE, Server
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.user_code import Option, ours_or_own

SUM = "sum"
ENVIRONMENT = "environment"  # its numbers are the rewards
AGENT = "agent"  # its own number is the reward
JUDGE = "judge"  # a model behind a server
WHOLE = (SUM, ENVIRONMENT, AGENT)  # no part of a sum
ALONE = (
    "exact", "numeric", "choice", "pattern", "math-verify", "reasoning-gym", "json-schema", JUDGE,
)  # fmt: skip
JUDGE_PATIENCE_S = 300.0  # for a server that is away or too busy


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart(Section, section="reward.parts"):
    """One part of a weighted sum."""

    verifier: Annotated[str, ours_or_own(ALONE)]
    """As `reward.verifier`, except `sum`, `environment` and `agent`."""
    weight: float = 1.0
    """Factor of this part in the sum."""
    name: str = ""
    """Name under which it is recorded and plotted; empty: the verifier's own name."""
    options: dict[str, Option] = field(default_factory=dict)
    """As `reward.options`."""

    @property
    def label(self) -> str:
        """The name that it goes by."""
        return self.name or self.verifier.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection(Section, section="reward"):
    """Judging answers."""

    verifier: Annotated[str, ours_or_own((*ALONE, *WHOLE))] = "exact"
    """`exact`, `numeric`, `choice`, `pattern`, `math-verify`, `reasoning-gym`, `json-schema`,
    `judge` (a model behind a server), `sum`, `environment` or `agent` (its own numbers alone), or
    your `file.py:function` or `module:function`, called with (prompt, completion, answer, metadata)
    in a separate process."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for the verifier; secrets (`api_key`, `token`) as `env:NAME` or
    `file:PATH`."""
    parts: tuple[RewardPart, ...] = ()
    """For `sum`: verifiers, each with `verifier`, `weight`, `name` and `options`."""
    require_stop: bool = True
    """An answer cut at max_new_tokens earns 0."""
    timeout_s: PositiveFloat = 10.0
    """Time limit for one call of user code, or one request to a judge."""
    attempts: PositiveInt = 3
    """Calls for one answer while your function raises; an exception with `final = True` is not
    tried again."""
    processes: PositiveInt = 2
    """Processes that run user code, in each rollout worker."""
    concurrency: PositiveInt = 32
    """Concurrent calls of an `async def` in each such process; a plain function has one."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of one such process, MB; a call that needs more fails. 0: no limit."""

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Its verifier and those of its parts."""
        return (self.verifier, *(part.verifier for part in self.parts))

    def _problems(self) -> Iterator[str]:
        if (self.verifier == SUM) != bool(self.parts):
            yield (
                f"[verifier] with {len(self.parts)} reward.parts: parts are for `{SUM}`, and it "
                "needs at least one"
            )
        names = [part.label for part in self.parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"reward.parts: two are called {twice[0]!r}; give each a `name`"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSection(Section, section="judge"):
    """The server of a model that judges, started and watched with the run's other servers."""

    model: str = ""
    """Model folder, or `hf:ORG/NAME`, that the verifier `judge` asks where its options name no
    `url`; empty: you serve it. It stays as it is: no weights are pulled into it."""
    engine: Server = "vllm"
    """Program that serves it."""
    python: str = ""
    """Python executable of that server's environment; empty: as `engine.python`."""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Arguments for it, without dashes: `gpu-memory-utilization = 0.4` on a GPU that others use."""
    env: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Environment variables of the server, such as `CUDA_VISIBLE_DEVICES`; secrets as `env:NAME` or
    `file:PATH`."""
    host: Ipv4 = "127.0.0.1"
    """Address that it listens on, without authentication, and that rollout workers ask."""
    port: Port = 8100
    """Its port."""
    start_s: PositiveFloat = 600.0
    """Time limit for its start. So long verifiers ask again while it is away, unless their options
    say `patience_s`."""

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.host}:{self.port}"

    def _problems(self) -> Iterator[str]:
        if not self.port:
            yield "judge.port must be above 0: all who ask have to know it"


def judged_by_server(
    section: RewardSection, judge: JudgeSection, away_s: float = 0.0
) -> RewardSection:
    """The section with the server of the run's judge, where verifiers `judge` name none.

    Args:
        away_s: longest time that other roles have the server's device.
    """
    own: dict[str, Option] = {}
    if judge.model:
        own = {"url": judge.url, "model": judge.model, "patience_s": judge.start_s + away_s}

    def options(verifier: str, given: dict[str, Option]) -> dict[str, Option]:
        return {**own, **given} if verifier == JUDGE and "url" not in given else given

    parts = tuple(replace(p, options=options(p.verifier, p.options)) for p in section.parts)
    return replace(section, options=options(section.verifier, section.options), parts=parts)


def judge_problems(section: RewardSection, judge: JudgeSection) -> Iterator[str]:
    """A judge that nobody asks, or that has no model."""
    if not judge.model and judge != JudgeSection():
        yield "judge.model is empty: name the model that the server of [judge] has"
    if judge.model and judged_by_server(section, judge) == section:
        yield (
            "judge.model is set, but [reward.verifier]: no verifier is 'judge' without a url of "
            "its own, so nobody would ask that server"
        )


def shared_judge_problems(judge: JudgeSection, device: Device) -> Iterator[str]:
    """Check a judge that shares a device: its server has to sleep, and to wake as it was."""
    if not judge.model:
        yield f"judge.model is empty, but device {device.name!r} names the role judge: set it"
    if judge.engine != "vllm":
        yield (
            f"judge.engine is {judge.engine!r}, but the judge shares device {device.name!r}: it "
            "would wake without its weights; set 'vllm', or leave judge out of devices.roles"
        )
    visible, gpus = judge.env.get(VISIBLE), ",".join(map(str, device.gpus))
    if visible is not None and str(visible) != gpus:
        yield (
            f"judge.env.{VISIBLE} is {visible!r}, but the judge shares device {device.name!r}, "
            f"which has gpus {list(device.gpus)}: leave it out"
        )


def judging_s(section: RewardSection) -> float:
    """Longest time of one answer's reward, seconds: each term's attempts, one after the other."""
    terms = section.parts or (section,)
    return sum(term_s(section, term.verifier, term.options) for term in terms)


def term_s(section: RewardSection, verifier: str, options: Mapping[str, Option]) -> float:
    """Longest time of one verifier, seconds; a judge waits for its server, then for an answer."""
    if verifier != JUDGE:
        return section.timeout_s * section.attempts
    patience_s = options.get("patience_s", JUDGE_PATIENCE_S)
    if isinstance(patience_s, bool) or not isinstance(patience_s, int | float) or patience_s <= 0:
        raise ConfigError(
            f"reward.options of {JUDGE!r}: patience_s must be above 0, got {patience_s!r}"
        )
    return patience_s + 2 * section.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection(Section, section="environment"):
    """User code that answers the policy between its turns."""

    name: str = ""
    """Your `file.py:Class` or `module:Class`, one object per sample, in a separate process; empty:
    a sample is one answer."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for the class; secrets (`api_key`, `token`) as `env:NAME` or
    `file:PATH`."""
    max_turns: PositiveInt = 8
    """Turns of the policy in one sample, at most."""
    role: str = "tool"
    """Role of the message that a text of the environment becomes, where the prompt is a chat."""
    timeout_s: PositiveFloat = 30.0
    """Time limit for one step."""
    processes: PositiveInt = 2
    """Processes that hold environments, in each rollout worker."""
    concurrency: PositiveInt = 32
    """Concurrent steps in each such process, if `step` is an `async def`; a plain one has one."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of one such process, MB; a step that needs more fails. 0: no limit."""

    def _problems(self) -> Iterator[str]:
        if not self.role:
            yield 'environment.role must not be empty: "tool" or "user" are usual'
        if self.options and not self.name:
            yield "environment.options are set, but environment.name is empty"
