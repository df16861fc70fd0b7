"""From a configuration to an engine of model servers that others run."""

from __future__ import annotations

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap.model_server import SERVERS, servers_of
from rlstreams.workers.config.checks import check_address
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import PauseMode
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.loop.context import Context
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.report_listener import ReportListener


def make_served_engine(context: Context) -> ServedEngine:
    """The engine of one rollout worker: servers that others run, by their addresses.

    Raises:
        ConfigError: a model folder or an address that cannot be used.
    """
    config = context.config
    model = model_folder(config.model.path)
    try:
        shape = read_shape(model)
        max_tokens = longest_sequence(model)
    except EngineError as err:
        raise ConfigError(f"model.path: {err}") from err
    settings, instance = settings_of(config), context.instance
    folder = context.folder / SERVERS / context.worker
    listener = report_listener_of(config)
    log = context.log

    def note(what: str) -> None:
        log.info("engine", what=what)

    servers = [
        ServerClient(
            url,
            settings,
            shape,
            PluginDelivery(
                listener,
                model,
                folder / f"versions-{number}",
                str(number),
                instance=instance,
                probe_s=settings.silent_s,
            ),
            instance=instance,
        )
        for number, url in enumerate(servers_of(context))
    ]
    return ServedEngine(settings, shape, max_tokens, servers, note=note, on_close=listener.close)


def report_listener_of(config: RunConfig) -> ReportListener:
    """The listener that the servers of one worker report to.

    Raises:
        ConfigError: no such address here.
    """
    check_address("engine.report_host", config.engine.report_host)
    return ReportListener(config.engine.report_host)


def settings_of(config: RunConfig) -> ServedSettings:
    """Limits and deadlines of an engine of model servers."""
    engine, device = config.engine, config.shared_device("rollout")
    return ServedSettings(
        kind=Kind(config.rollout.engine),
        limit=engine.max_running,
        adapts=engine.adapt,
        capture_experts=config.rollout.capture_experts,
        on_pull=PauseMode(engine.on_pull),
        keep_cache=engine.cache_on_pull == "keep",
        pull_s=config.weights.pull_deadline_s,
        request_s=engine.request_s,
        answer_s=engine.answer_s,
        start_s=engine.start_s,
        silent_s=engine.silent_s,
        change_s=device.change_s if device is not None else engine.answer_s,
        allow_untested=engine.allow_untested,
    )
