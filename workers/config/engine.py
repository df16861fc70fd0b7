"""The section of a configuration about model servers: `rollout.engine = "vllm"` or `"sglang"`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streams.errors import ConfigError
from workers.config.checks import check_urls, positive

# Of vLLM and of SGLang, both spellings; the values that are refused are those above 1.
_REPLICAS = frozenset({"data-parallel-size", "dp-size"})
_STAGES = frozenset({"pipeline-parallel-size", "pp-size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """Model servers. The built-in engine reads none of it."""

    urls: tuple[str, ...] = ()
    """Running servers, `http://host:port`; empty: each rollout worker starts one and minds it."""
    routers: tuple[str, ...] = ()
    """For generation only: a `vllm-router` or `sglang-router` for each rollout worker, in front of
    exactly the servers of `urls` that are that worker's; all else goes to each server itself."""
    python: str = ""
    """Python of the environment that has the server; empty: the one that runs rlstreams."""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Arguments for a server that is started, without dashes: `max-model-len = 4096`."""
    env: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Environment variables for it; secrets (`..._TOKEN`, `..._KEY`) as `env:NAME`, `file:PATH`."""
    host: str = "127.0.0.1"
    """Where it listens: loopback, or one private interface. Its control routes ask for no key."""
    port: int = 0
    """Its port; 0: a free one."""
    report_host: str = "127.0.0.1"
    """Address of this worker by which its servers report that a version arrived."""
    load: Literal["dummy", "auto"] = "dummy"
    """`dummy`: it starts with random weights, which no request sees; `auto`: it reads the model
    folder, to look at a server by hand."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of its log, which is kept beside the worker's."""
    max_running: int = 64
    """Requests that one server is given at once."""
    on_pull: Literal["keep", "abort", "wait"] = "keep"
    """Running requests while weights change: they go on, are cut and resumed, or finish first."""
    cache_on_pull: Literal["keep", "recompute"] = "keep"
    """With `keep`: go on with old keys and values, or compute them again under the new weights."""
    allow_untested: bool = False
    """Use a version of the server that rlstreams was not run with."""
    start_s: float = 600.0
    """Longest start of a server."""
    request_s: float = 600.0
    """Longest request."""
    answer_s: float = 30.0
    """Longest answer of a control route."""
    silent_s: float = 20.0
    """A server that answers no look at its health for so long is given up and started again."""

    def __post_init__(self) -> None:
        positive(
            "engine",
            max_running=self.max_running,
            start_s=self.start_s,
            request_s=self.request_s,
            answer_s=self.answer_s,
            silent_s=self.silent_s,
        )
        self._refuse_spread()
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"engine.port must be in [0, 65535], got {self.port}")
        check_urls("engine.urls", self.urls)
        check_urls("engine.routers", self.routers)
        if self.routers and not self.urls:
            raise ConfigError(
                "engine.routers is set, but engine.urls is empty: name the servers behind them too"
            )
        if self.host in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"engine.host is {self.host!r}: a server's control routes ask for no key, so it "
                "listens on loopback or on one private interface"
            )

    def _refuse_spread(self) -> None:
        """A worker fills tensor and expert parallel ranks, and nothing else of one server."""
        for name, value in self.args.items():
            flag = name.lstrip("-").replace("_", "-")
            if flag not in _REPLICAS | _STAGES or str(value) == "1":
                continue
            cure = (
                "start several servers instead (rollout.workers, or engine.urls)"
                if flag in _REPLICAS
                else "spread the model by tensor-parallel-size (SGLang: tp-size) instead"
            )
            raise ConfigError(f"engine.args.{name} is {value}: weights cannot reach that; {cure}")
