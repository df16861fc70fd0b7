"""The tables of a configuration about agents, which call the model, and about their outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rlstreams.workers.config.checks import (
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    every_interface,
)
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.reward import AGENT, EnvironmentSection, RewardSection
from rlstreams.workers.config.user_code import Option, located


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSection(Section, section="agent"):
    """An agent: it gets a task, calls the model as an OpenAI server, and ends."""

    name: str = "agent"
    """Name in events and on screens."""
    weight: PositiveFloat = 1.0
    """Its share of the groups, beside other agents."""
    command: tuple[str, ...] = ()
    """A program and its arguments, one process per sample, with `OPENAI_BASE_URL`,
    `OPENAI_API_KEY` and the task's file in `RLSTREAMS_TASK`; or else `python`."""
    python: str = ""
    """Your `file.py:function` or `module:function`, an `async def` of (task, client), in a separate
    process that many samples share; `client` is an `openai.AsyncOpenAI`."""
    remote: bool = False
    """Runners of yours, on any machine, ask the gateway for its sessions and start it: see
    section `gateway`; or else `command` or `python`."""
    outside: bool = False
    """Programs that nobody starts, with work of their own, ask the gateway for sessions and call
    the model; rows of the data are counted, not read. Or else one of the three above."""
    env: dict[str, str] = field(default_factory=dict)
    """Further variables of `command`; secrets as `env:NAME` or `file:PATH`."""
    options: dict[str, Option] = field(default_factory=dict)
    """Keyword arguments for `python`; secrets (`api_key`, `token`) as `env:NAME` or `file:PATH`."""
    max_calls: PositiveInt = 64
    """Model calls of one start of the agent, at most, with those that are answered from the log; a
    further one is refused, and the sample is judged."""
    max_tokens: NonNegativeInt = 0
    """Tokens that the calls of one start may sample; 0: no limit but the model's length."""
    timeout_s: PositiveFloat = 240.0
    """Time limit for one start of the agent; then it is ended, and the sample is judged."""
    starts: PositiveInt = 3
    """Starts of the agent within one worker, if its process or its runner is lost by no fault of
    its own."""
    lease_s: PositiveFloat = 60.0
    """A runner that says nothing for so long, by no call and no heartbeat, loses its session to
    the next one that asks; a session of a client from outside is set aside."""
    ignore: tuple[str, ...] = ()
    """Regular expressions: requests that differ in what these find alone, in texts that are no
    answer of the policy, are one. A date or a random name that each start writes anew, say."""
    auxiliary_models: tuple[str, ...] = ()
    """Regular expressions: a call whose request asks for a model in whose name one of these is
    found is beside the task, a title or a summary: it is recorded, and never learnt from."""
    auxiliary_prompts: tuple[str, ...] = ()
    """The same, of calls that have one of these in a system message. A client can say it of each
    call by itself, with the header `x-rlstreams-is-trained: false`."""
    branches: bool = False
    """Whether calls beside the main chain are learnt from, too: forks, sub-agents, histories that
    were written anew; by the session's reward, each token once."""
    processes: PositiveInt = 2
    """Processes that run `python`, in each rollout worker."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of one such process, MB. 0: no limit."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether nothing of ours starts it."""
        return self.remote or self.outside

    def _problems(self) -> Iterator[str]:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.name):
            yield f"agent.name must be 1 to 64 letters, digits, `-`, `_` or `.`, got {self.name!r}"
        ways = {"command": self.command, "python": self.python, "remote": self.remote,
                "outside": self.outside}  # fmt: skip
        named = [f"`{way}`" for way, value in ways.items() if value]
        if len(named) != 1:
            found = f"{' and '.join(named)} are set" if named else "none is set"
            yield (
                f"agent {self.name!r}: set one of `command`, `python`, `remote = true` and "
                f"`outside = true`; {found}"
            )
        if self.python and located(self.python) is None:
            yield (
                "agent.python must be `file.py:function` or `module:function`, got "
                f"{self.python!r}, of agent {self.name!r}"
            )
        for field_name in ("ignore", "auxiliary_models", "auxiliary_prompts"):
            yield from self._no_expressions(field_name)
        if self.env and not self.command:
            yield f"agent.env is set, but agent {self.name!r} has no `command`"
        if self.options and not self.python:
            yield f"agent.options is set, but agent {self.name!r} has no `python`"

    def _no_expressions(self, name: str) -> Iterator[str]:
        for text in getattr(self, name):
            try:
                is_idle = re.compile(text).search("") is not None
            except re.error as err:
                yield f"agent.{name}: {text!r} of agent {self.name!r} is no expression: {err}"
            else:
                if is_idle:
                    yield (
                        f"agent.{name}: {text!r} of agent {self.name!r} finds nothing, too: have "
                        "it find one character at least, and no more than need be"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySection(Section, section="gateway"):
    """Address at which runners of remote agents, and clients from outside, reach the rollout
    workers."""

    host: str = "127.0.0.1"
    """Address of the network interface on which rollout workers listen for runners."""
    port: Port = 0
    """Port of worker `rollout-0`; `rollout-N` has the N-th behind it. 0: any free one, which the
    worker's `runner.json` names, and which it takes again when it is started again there."""
    url: str = ""
    """Address for runners, if it is another: a reverse proxy's, with `{port}` for the worker's
    port. Empty: `http://host:port`."""

    def _problems(self) -> Iterator[str]:
        example = self.url.replace("{port}", "1")
        parts = urlsplit(example)
        if self.url and (parts.scheme not in ("http", "https") or not parts.hostname):
            yield f"gateway.url must be like https://host:{{port}}, got {self.url!r}"
        if re.search(r"[{}?#]", example):
            yield f"gateway.url may have no braces but {{port}}, no ? and #, got {self.url!r}"
        if not self.url:
            yield from every_interface(
                "host",
                self.host,
                "runners are given this address; name that of one interface, or set gateway.url",
            )


def agent_problems(
    agents: Sequence[AgentSection],
    *,
    gateway: GatewaySection,
    workers: int,
    reward: RewardSection,
    environment: EnvironmentSection,
    data: DataSection,
    deadline_s: float,
) -> Iterator[str]:
    """Problems of settings that exclude agents or need them; as `worded` completes them."""
    if not agents:
        if gateway != GatewaySection():
            yield "gateway is set, but there is no table [[agent]]: nobody would ask there"
        if reward.verifier == AGENT:
            yield "[reward.verifier], but there is no table [[agent]]: nobody would give a reward"
        return
    if not any(agent.is_elsewhere for agent in agents) and gateway != GatewaySection():
        yield (
            "gateway is set, but no table [[agent]] has remote = true or outside = true: nobody "
            "would ask there"
        )
    yield from _outside_problems(agents, reward, data)
    if gateway.port and gateway.port + workers > 1 << 16:
        yield "[gateway.port], but [rollout.workers]: there are no ports above 65535"
    names = [agent.name for agent in agents]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"agent.name is {twice[0]!r} twice: events and screens name agents by it"
    if environment.name:
        yield (
            "[environment.name], and there are tables [[agent]]: an agent answers the policy "
            "between its turns by itself; keep one of them"
        )
    if data.is_always_chat:
        field = "data.system_prompt" if data.system_prompt else "data.chat"
        yield (
            f"[{field}], and there are tables [[agent]]: an agent gets the row's text and writes "
            "its own messages; leave it out, and have the agent say it"
        )
    for agent in agents:
        if agent.is_elsewhere and agent.lease_s > agent.timeout_s:
            yield (
                f"agent.lease_s is {agent.lease_s:g} of agent {agent.name!r}, but its timeout_s is "
                f"{agent.timeout_s:g}: its session would be at its limit before it may be silent "
                "for so long, and without a reward earn 0; set agent.timeout_s to the longest that "
                "a session lasts"
            )
        if agent.timeout_s >= deadline_s:
            yield (
                f"agent.timeout_s is {agent.timeout_s:g} of agent {agent.name!r}, but "
                "[rollout.sample_deadline_s]: the sample would be set aside before its agent is "
                "ended and judged; set a shorter limit of the agent"
            )


def _outside_problems(
    agents: Sequence[AgentSection], reward: RewardSection, data: DataSection
) -> Iterator[str]:
    """Problems of settings that sessions from outside, which are no rows of the data, exclude."""
    outside = [agent for agent in agents if agent.outside]
    if outside and reward.verifier != AGENT:
        yield (
            f"[reward.verifier], and agent {outside[0].name!r} is outside: it would compare what "
            "its clients do with rows of the data; set 'agent', and have them post an outcome"
        )
    if outside and len(outside) == len(agents) and data.has_held_out:
        yield (
            f"data has held-out rows, and agent {outside[0].name!r} is outside, as all are: nobody "
            "would answer them; leave them out, or name another agent"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeSection(Section, section="outcome"):
    """Rewards that others give, after an agent's session."""

    wait_for: tuple[str, ...] = ()
    """Graders, as their outcomes name them: the sum of their rewards is the sample's, which is
    written when all have spoken. Empty: `reward.verifier` judges at once."""
    deadline_s: PositiveFloat = 600.0
    """Time limit from a session's end to the last of these outcomes; then it is set aside."""

    def _problems(self) -> Iterator[str]:
        if twice := sorted({name for name in self.wait_for if self.wait_for.count(name) > 1}):
            yield f"outcome.wait_for names {twice[0]!r} twice"
        if "" in self.wait_for:
            yield "outcome.wait_for has an empty name: no outcome has such a grader"

    @property
    def late_s(self) -> float:
        """Longest wait of a sample after its session, seconds; 0: it waits for no grader."""
        return self.deadline_s if self.wait_for else 0.0


def outcome_problems(outcome: OutcomeSection, *, has_agents: bool) -> Iterator[str]:
    """Problems of settings that need agents."""
    if outcome.wait_for and not has_agents:
        yield "[outcome.wait_for], but there is no table [[agent]]: outcomes are of sessions"


def late_problems(outcome: OutcomeSection, group_s: float, sample_s: float) -> Iterator[str]:
    """Problems of deadlines that would drop a group before its graders have reported."""
    if outcome.wait_for and group_s < sample_s + outcome.late_s:
        yield (
            "[trainer.group_deadline_s], but [outcome.deadline_s]: a group's clock starts with its "
            "first scored sample, and would drop it while siblings wait for their graders; set at "
            f"least {sample_s + outcome.late_s:g}, or a shorter outcome.deadline_s"
        )
