"""Checks of the model servers that a run names or will start. Starts and changes none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.check.doctor.check import Check, Host, Level, fail, ok, probed, warn
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.run import RunConfig

if TYPE_CHECKING:
    from rlstreams.workers.engines.served.facts import Kind

ASK_S = 3.0  # longest answer of a server that works


def engine_checks(config: RunConfig, host: Host, *, has_model: bool) -> Iterator[Check]:
    """Checks of the model servers; none of the built-in engine, which the model's checks cover.

    Args:
        has_model: the model's folder is on this machine and can be read.
    """
    if config.judge.model and host.has("server"):
        yield from probed("judge", lambda: _judge(config))
    if not config.is_served:
        return
    if config.engine.urls and host.has("rollout"):
        every = host.ordinal is None
        ordinals = range(config.rollout.workers) if every else [host.ordinal or 0]
        yield from _running(config, ordinals)
    is_started = host.role == "server" or not (config.engine.urls or host.is_alone)
    if is_started:
        yield from probed("engine", lambda: installed(config, has_model=has_model))
    if not config.engine.urls:
        yield from probed("engine.port", lambda: _ports(config, host))


def _judge(config: RunConfig) -> Check:
    """Check the judge's server, as it will be started."""
    from rlstreams.workers.bootstrap.judge_server import command_of_judge

    command, version = command_of_judge(config)
    judge = config.judge
    return ok("judge", f"{judge.engine} {version} in {command.argv[0]}, with {judge.model}")


def installed(config: RunConfig, *, has_model: bool) -> Check:
    """Check the server that will be started; a warning where its version was never tried.

    Raises:
        ConfigError: no such Python, no such server in it or one that is too old, an argument of
            the user's that contradicts one of ours.
    """
    from rlstreams.workers.bootstrap.model_server import command_of, found_server, where_installed
    from rlstreams.workers.engines.served.facts import Kind, too_old, untested

    kind = Kind(config.rollout.engine)
    where = where_installed(config, kind) if has_model else found_server(config, kind)
    found = f"{kind} {where.version} in {where.python}"
    if (why := too_old(kind, where.version)) and not config.engine.allow_untested:
        raise ConfigError(f"engine.python: {found} is {why}")
    if has_model:
        command_of(config, kind, where, f"http://{config.engine.host}:{config.engine.port}", {})
    if why := untested(kind, where.version):
        return warn("engine", f"{found} was {why}", "")
    return ok("engine", found)


def _ports(config: RunConfig, host: Host) -> Check:
    """Whether each server can have its port; that of a run that is up is its own."""
    from rlstreams.workers.bootstrap.addresses import port_of
    from rlstreams.workers.engines.served.facts import Kind

    if not config.engine.port and host.is_alone:
        return fail(
            "engine.port",
            "engine.port is 0: only `rlstreams up` gives all roles the port that it chose",
            "set the port of the first server, or engine.urls",
        )
    if not config.engine.port:
        return ok("engine.port", "engine.port is 0: a free one is chosen for each server")
    kind, advice = Kind(config.rollout.engine), "end it, or set engine.port to a free port, or to 0"
    numbers = range(config.num_servers) if host.ordinal is None else [host.ordinal]
    others = [number for number in numbers if not _is_up(config, kind, number)]
    ports = [port_of(config, n) for n in others]
    if not host.is_alone and not config.broker.bootstrap and config.broker.port in ports:
        return fail(
            "engine.port", f"{config.broker.port} is broker.port too", "give one of them another"
        )
    if taken := [str(port) for port in ports if _is_taken(config.engine.host, port)]:
        return fail("engine.port", f"another process listens on {', '.join(taken)}", advice)
    free = f"free: {', '.join(map(str, ports))}"
    return ok("engine.port", free if ports else "the run's own servers are up")


def _is_taken(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), ASK_S):
        return True
    return False


def _is_up(config: RunConfig, kind: Kind, number: int) -> bool:
    """Whether this server of the run runs now."""
    from rlstreams.workers.bootstrap.model_server import server_log
    from rlstreams.workers.server.process import pid_file

    with contextlib.suppress(OSError, ValueError):
        os.kill(int(pid_file(server_log(Path(config.folder), kind, number)).read_text("ascii")), 0)
        return True
    return False


def _running(config: RunConfig, ordinals: Sequence[int]) -> Iterator[Check]:
    """A check for each server; a worker that has another server can do without one."""
    from rlstreams.workers.bootstrap.model_server import urls_of

    for ordinal in ordinals:
        servers = asyncio.run(_met(config, urls_of(config, config.engine.urls, ordinal)))
        is_served = any(answers for _, answers in servers)
        for one, answers in servers:
            # A server that answers and is refused ends its worker's part in the run; one that does
            # not answer is waited for.
            is_fatal = one.level is Level.WARN and not answers and not is_served
            yield fail(one.name, one.found, one.advice) if is_fatal else one


async def _met(config: RunConfig, urls: Sequence[str]) -> list[tuple[Check, bool]]:
    """The servers of one worker, all asked at once, and whether each can be used."""
    return await asyncio.gather(*(_server(config, url) for url in urls))


async def _server(config: RunConfig, url: str) -> tuple[Check, bool]:
    from rlstreams.workers.engines.served.adapters import ask_usable
    from rlstreams.workers.engines.served.facts import Kind, RouterError, untested
    from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp

    kind, http = Kind(config.rollout.engine), ServerHttp(url)
    name, start = "engine.urls", f"start it (`rlstreams config server {kind} CONFIG` prints how)"
    try:
        facts = await ask_usable(http, kind, ASK_S, allow_untested=config.engine.allow_untested)
    except ServerGoneError as err:
        return warn(name, str(err), f"{start}, or correct engine.urls"), False
    except RouterError as err:
        return fail(name, str(err), err.cure), False
    except ServerError as err:
        if err.status >= 500:  # it, or a proxy in front of it, is not ready yet
            return warn(name, str(err), "wait until it is ready, or see its log"), False
        return fail(name, str(err), f"{start} as such a server, or correct engine.urls"), False
    finally:
        await http.close()
    asks = f"(`rlstreams doctor --server {url}` asks more)"
    found = f"{url}: {facts.name}, model {facts.model} {asks}"
    if why := untested(kind, facts.version):
        return warn(name, f"{found}; it was {why}", ""), True
    return ok(name, found), True
