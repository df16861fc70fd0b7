"""The section of a configuration about model servers: `rollout.engine = "vllm"` or `"sglang"`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rlstreams.workers.config.checks import (
    Ipv4,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    check_urls,
    every_interface,
)

# Of vLLM and of SGLang, both spellings; the values that are refused are those above 1.
_REPLICAS = frozenset({"data-parallel-size", "dp-size"})
_STAGES = frozenset({"pipeline-parallel-size", "pp-size"})
_RANKS = ("tensor-parallel-size", "tp-size", "tp")
Server: TypeAlias = Literal["vllm", "sglang"]  # kinds; each has an `Adapter`
VISIBLE = "CUDA_VISIBLE_DEVICES"
NAMED_CACHE = "kv-cache-memory-bytes"  # of vLLM, which then looks at its share only as it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection(Section, section="engine"):
    """Model servers. The built-in engine ignores this section."""

    urls: tuple[str, ...] = ()
    """Servers, `http://host:port`, dealt to rollout workers in turn; empty: `up` starts them."""
    servers: PositiveInt = 1
    """Servers that `up` starts for each rollout worker. GPUs that `CUDA_VISIBLE_DEVICES`
    in `env` names are dealt out to all in turn, to each as many as it has ranks."""
    python: str = ""
    """Python executable of the server's environment; empty: the one that runs rlstreams."""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Arguments for a server that is started, without dashes: `max-model-len = 4096`."""
    env: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Environment variables of such a server, the same for each; secrets (`..._TOKEN`, `..._KEY`)
    as `env:NAME` or `file:PATH`."""
    host: Ipv4 = "127.0.0.1"
    """Address that such a server listens on, without authentication: loopback, or one private
    interface."""
    port: Port = 0
    """Port of the first server, the next has the next; 0: any free, which `up` gives to all."""
    report_host: Ipv4 = "127.0.0.1"
    """Address of this worker to which its servers report that a version has arrived."""
    load: Literal["dummy", "auto"] = "dummy"
    """`dummy`: such a server starts with random weights, which no request uses; `auto`: with the
    folder's."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Level of such a server's log, which is kept next to the worker's."""
    max_running: PositiveInt = 256
    """Maximum concurrent requests per server."""
    adapt: bool = False
    """Whether fewer are sent while its cache is full or requests wait in it, and few to one that
    has just started; false: always `max_running`."""
    on_pull: Literal["keep", "abort", "wait"] = "keep"
    """Requests in flight while weights change: continue, are cut and resumed, or finish first."""
    cache_on_pull: Literal["keep", "recompute"] = "keep"
    """With `keep`: continue with the old KV cache, or recompute it under the new weights."""
    allow_untested: bool = False
    """Accept a server that is older than all that rlstreams was run with."""
    start_s: PositiveFloat = 600.0
    """Time limit for a server to start."""
    request_s: PositiveFloat = 600.0
    """Time limit for one request."""
    answer_s: PositiveFloat = 30.0
    """Time limit for an answer of a control route."""
    silent_s: PositiveFloat = 20.0
    """A server, or its engine behind a front end that answers, that is silent for this long is
    restarted; an engine that has answered no request yet, for six times as long."""

    @property
    def gpus_of_one(self) -> int:
        """GPUs that a server is spread over."""
        args = {name.lstrip("-").replace("_", "-"): value for name, value in self.args.items()}
        sizes = [str(args[name]) for name in _RANKS if name in args]
        return max([1, *(int(size) for size in sizes if size.isdecimal())])

    def visible(self, number: int, num_servers: int) -> str | None:
        """`CUDA_VISIBLE_DEVICES` of one of a run's servers; None: that of its worker.

        Args:
            number: of the server, from 0, among those of all workers.
        """
        if VISIBLE not in self.env:
            return None
        named = str(self.env[VISIBLE])
        names, size = [name.strip() for name in named.split(",")], self.gpus_of_one
        if num_servers == 1 or not named:
            return named
        return ",".join(names[n % len(names)] for n in range(number * size, (number + 1) * size))

    def _problems(self) -> Iterator[str]:
        """See `Section`: a worker fills tensor and expert parallel ranks, and nothing else of one
        server."""
        if self.urls and self.servers > 1:
            yield (
                f"[servers], but engine.urls names {len(self.urls)} that run already: leave "
                "one of them out"
            )
        for name, value in self.args.items():
            flag = name.lstrip("-").replace("_", "-")
            if flag not in _REPLICAS | _STAGES or str(value) == "1":
                continue
            cure = (
                "start several servers instead (engine.servers, rollout.workers or engine.urls)"
                if flag in _REPLICAS
                else "spread the model by tensor-parallel-size (SGLang: tp-size) instead"
            )
            yield f"engine.args.{name} is {value}: weights cannot reach that; {cure}"
        check_urls("engine.urls", self.urls)
        yield from every_interface(
            "host",
            self.host,
            "a server's control routes ask for no key, so it listens on loopback or on one private "
            "interface",
        )
        yield from every_interface(
            "report_host",
            self.report_host,
            "servers are given this address to report to; name the one that they reach this "
            "worker by",
        )
