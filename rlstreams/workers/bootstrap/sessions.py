"""From a configuration to the agents of a rollout worker, and the gateway that they call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from rlstreams.streams.log.bus import Appender
from rlstreams.workers.agents.agent import Agent
from rlstreams.workers.agents.asking import AskedAgent, Runners
from rlstreams.workers.agents.command import CommandAgent
from rlstreams.workers.agents.outside import OutsideAgent
from rlstreams.workers.agents.python_agent import PythonAgent
from rlstreams.workers.agents.remote import RemoteAgent
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.reward import AGENT
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import code_hashes
from rlstreams.workers.engines.base import Engine
from rlstreams.workers.gateway.http.dialects import read_again
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.open_sessions import OpenSessions
from rlstreams.workers.gateway.rendering import make_renderer
from rlstreams.workers.gateway.shared import SharedParts
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.runtime import Pausable
from rlstreams.workers.model.folder import eos_ids_of
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import sampling_of
from rlstreams.workers.rollout.session_player import SessionPlayer
from rlstreams.workers.rollout.sessions import ConfiguredAgent, Sessions
from rlstreams.workers.rollout.verifiers import verifier_of
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.reward import Verifier
from rlstreams.workers.weights.channel import WeightChannel

FOLDER = "agents"  # below the run's: tasks and output of agents that run


def make_agents_role(
    context: Context, engine: Engine, channel: WeightChannel, secret: str
) -> Pausable:
    """The rollout role whose samples agents make; arguments and errors of
    `make_sessions`."""
    sessions = make_sessions(context, engine, secret)
    player = SessionPlayer(sessions, context.bus, context.config.outcome)
    return make_worker(context, context.bus, engine, channel, player)


def make_sessions(context: Context, engine: Engine, secret: str) -> Sessions:
    """The agents that the configuration names, ready to be started.

    Args:
        secret: the run's; it seals the agents' keys.

    Raises:
        ConfigError: an agent that cannot be started, or a verifier that cannot be used.
    """
    log = context.log

    def note(what: str) -> None:
        log.warning("user_code", what=what)

    return sessions_of(
        context.config,
        engine,
        secret,
        appender=context.bus.appender(),
        verifier=verifier_of(context.config, note),
        folder=context.folder / FOLDER / context.worker,
        worker=context.worker,
        instance=context.instance,
        ordinal=context.ordinal,
        note=note,
    )


def sessions_of(
    config: RunConfig,
    engine: Engine,
    secret: str,
    *,
    appender: Appender,
    verifier: Verifier,
    folder: Path,
    worker: str,
    instance: str,
    ordinal: int = 0,
    note: Callable[[str], None],
) -> Sessions:
    """The same, for a caller that commits the requests in `open_sessions.shared.commits`.

    Args:
        appender: of calls.
        folder: for tasks and output of agents that run; made anew.
        ordinal: of the worker, among those whose gateways share a host.
        note: called with problems beside sessions.

    Raises:
        ConfigError: an agent that cannot be started.
    """
    asked: list[AskedAgent] = []

    def agent_of(section: AgentSection) -> Agent:
        if section.is_elsewhere:
            kind = RemoteAgent if section.remote else OutsideAgent
            agent = kind(section, folder / section.name)
            asked.append(agent)
            return agent
        if section.command:
            return CommandAgent(section, folder / section.name)
        return PythonAgent(section, engine.max_capacity, note)

    shared = _shared(config, engine, appender, worker, instance)
    keys = Keys(secret)
    members = [
        ConfiguredAgent(section=section, agent=agent_of(section), code_hash=_code_hash(section))
        for section in config.agent
    ]
    if asked:
        check_address("gateway.host", config.gateway.host)
    return Sessions(
        open_sessions=OpenSessions(shared, keys, config.run.id),
        members=members,
        runners=Runners(asked, keys, config.gateway, ordinal) if asked else None,
        verifier=verifier,
        verifier_name=config.reward.verifier,
        by_agent=config.reward.verifier == AGENT,
        sampling=sampling_of(config.rollout),
        evaluation=sampling_of(config.evaluation),
        deadline_s=config.rollout.sample_deadline_s,
        graders=config.outcome.wait_for,
    )


def _shared(
    config: RunConfig, engine: Engine, appender: Appender, worker: str, instance: str
) -> SharedParts:
    model, data = model_folder(config.model.path), config.data
    tokenizer = Tokenizer(model, template=data.template, options=data.template_options)
    return SharedParts(
        engine=engine,
        renderer=make_renderer(tokenizer, eos_ids_of(model), options=data.template_options),
        tokenizer=tokenizer,
        commits=CommitRequests(),
        appender=appender,
        loads=dict,  # until the role knows of one
        read_again=read_again,
        worker=worker,
        instance=instance,
        max_attempts=config.rollout.max_attempts,
    )


def _code_hash(section: AgentSection) -> str:
    """SHA-256 of an agent's settings and of the files that its `python` runs."""
    said = [msgspec.to_builtins(section), sorted(code_hashes(section.python).items())]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
