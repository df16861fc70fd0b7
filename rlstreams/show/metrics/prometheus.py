"""Prometheus exposition of the views: gauges and counters made anew at each scrape.

Counters are totals of the log, so a restart of this reader does not set them back. Every metric
has the label `run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.views.feed import ViewState

PREFIX = "rlstreams"
Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric, with a value for each combination of labels."""

    name: str
    about: str
    values: Values
    labels: tuple[str, ...] = ()
    is_total: bool = False  # only grows


class ViewCollector:
    """Turns one snapshot of the views into metrics: a collector of `prometheus_client`."""

    def __init__(self, run: str, state: Callable[[], ViewState]) -> None:
        self._run = run
        self._state = state

    def collect(self) -> Iterator[Any]:
        """All metrics, from one snapshot."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in families(self._state()):
            kind = CounterMetricFamily if family.is_total else GaugeMetricFamily
            made = kind(f"{PREFIX}_{family.name}", family.about, labels=("run", *family.labels))
            for labels, value in family.values.items():
                made.add_metric((self._run, *labels), value)
            yield made


@contextmanager
def served(run: str, state: Callable[[], ViewState], port: int) -> Iterator[int]:
    """Answer scrapes of `/metrics` on all interfaces meanwhile; gives the port.

    Args:
        port: 0: a free one.

    Raises:
        ConfigError: the port cannot be had.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(ViewCollector(run, state))
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as err:
        raise ConfigError(f"--port {port} cannot be had: {err}; choose another") from err
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Latest:
    """A snapshot that one thread sets and another reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = ViewState()

    def set(self, state: ViewState) -> None:
        """Put a newer one there."""
        with self._lock:
            self._state = state

    def __call__(self) -> ViewState:
        """The newest."""
        with self._lock:
            return self._state


def families(state: ViewState) -> Iterator[Family]:
    """Every metric of a snapshot. Pure."""
    yield from _steps(state)
    yield from _samples(state)
    yield from _workers(state)
    yield from _pulls(state)


def _one(value: float) -> Values:
    return {(): value}


def _steps(state: ViewState) -> Iterator[Family]:
    run = state.run
    yield Family(name="step", about="Newest step", values=_one(run.step))
    yield Family(name="step_target", about="Where the run ends", values=_one(run.step_target))
    yield Family(
        name="policy_version", about="Newest version made", values=_one(run.policy_version)
    )
    tokens, samples = (sum(getattr(p, f) for p in run.steps) for f in ("num_tokens", "num_samples"))
    yield Family(
        name="trained_tokens", about="Tokens, with prompts", values=_one(tokens), is_total=True
    )
    yield Family(
        name="trained_samples", about="Samples trained on", values=_one(samples), is_total=True
    )
    yield Family(
        name="redo_drifts",
        about="Steps done again with other weights",
        values=_one(run.num_drifts),
        is_total=True,
    )
    if not run.steps:
        return
    point = run.steps[-1]
    seconds = (point.finished_at_ms - point.started_at_ms) / 1000
    own = {"loss": point.loss, "reward": point.reward, "seconds": seconds}
    yield Family(
        name="step_metric",
        about="What the newest step says of itself",
        labels=("metric",),
        values={(name,): value for name, value in {**point.metrics, **own}.items()},
    )
    distances = {d: n for d, n in point.staleness.items() if n}
    trained = sum(distances.values())
    mean = sum(d * n for d, n in distances.items()) / trained if trained else 0.0
    yield Family(
        name="staleness_versions",
        about="Of the newest step's tokens",
        labels=("stat",),
        values={("mean",): mean, ("max",): max(distances, default=0)},
    )
    yield Family(
        name="step_finished_timestamp_seconds",
        about="When the newest step was done",
        values=_one(point.finished_at_ms / 1000),
    )


def _samples(state: ViewState) -> Iterator[Family]:
    flow, last = state.flow, state.evaluation.last
    yield Family(
        name="issued_samples", about="Samples issued", values=_one(flow.issued), is_total=True
    )
    yield Family(
        name="waiting_samples",
        about="Lag: samples in a topic that its reader has not finished",
        labels=("topic",),
        values={(topic,): number for topic, number in flow.waiting.items()},
    )
    yield Family(
        name="dead_letters",
        about="Samples set aside",
        labels=("role",),
        values={("rollout",): flow.dead_at_rollout, ("logprob",): flow.dead_at_logprob},
        is_total=True,
    )
    yield Family(
        name="dropped_groups",
        about="Groups dropped",
        labels=("reason",),
        values={(reason,): number for reason, number in state.run.dropped.items()},
        is_total=True,
    )
    if last is not None:
        yield Family(
            name="evaluation_mean_reward", about="Held-out rows", values=_one(last.accuracy)
        )
        yield Family(
            name="evaluation_version",
            about="Version last evaluated",
            values=_one(last.policy_version),
        )


def _workers(state: ViewState) -> Iterator[Family]:
    workers = state.throughput.workers
    names = ("worker", "role")
    yield Family(
        name="worker_state",
        about="1 for the state of the newest report",
        labels=(*names, "state"),
        values={(w.worker, w.role, w.state): 1.0 for w in workers},
    )
    yield Family(
        name="worker_host",
        about="1 for the host that the worker is on",
        labels=(*names, "host"),
        values={(w.worker, w.role, w.host): 1.0 for w in workers if w.host},
    )
    yield Family(
        name="worker_policy_version",
        about="Version held; -1: none",
        labels=names,
        values={(w.worker, w.role): w.policy_version for w in workers},
    )
    yield Family(
        name="worker_report_timestamp_seconds",
        about="When the worker last reported",
        labels=names,
        values={(w.worker, w.role): w.at_ms / 1000 for w in workers},
    )
    yield Family(
        name="worker_restarts",
        about="Processes after the first",
        labels=names,
        values={(w.worker, w.role): w.restarts for w in workers},
        is_total=True,
    )
    yield Family(
        name="worker_counter",
        about="What workers count: samples, tokens and the like",
        labels=(*names, "counter"),
        values={
            (w.worker, w.role, counter): value
            for w in workers
            for counter, value in w.totals.items()
        },
        is_total=True,
    )
    yield Family(
        name="worker_state_seconds",
        about="Time by state",
        labels=(*names, "state"),
        values={(w.worker, w.role, at): s for w in workers for at, s in w.seconds.items()},
        is_total=True,
    )


def _pulls(state: ViewState) -> Iterator[Family]:
    pulls = state.pulls
    for name, about, value in (
        ("pulls", "Pulls of weights that ended well", pulls.num_pulls),
        ("pull_bytes", "Bytes pulled", pulls.num_bytes),
        ("pull_seconds", "Time in pulls, summed", pulls.seconds),
        ("pull_paused_seconds", "Time without sampling for pulls, summed", pulls.paused_s),
    ):
        yield Family(name=name, about=about, values=_one(value), is_total=True)
