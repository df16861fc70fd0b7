"""Prometheus exposition of the views: gauges and counters made anew at each scrape.

Counters are totals of the log, so a restart of this reader does not set them back. Every metric
has the label `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlstreams.show.metrics.rows import step_row
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.views.feed import ViewState
from rlstreams.workers.config.load import from_json
from rlstreams.workers.loop.stall import limits_of

PREFIX = "rlstreams"
Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class MetricFamily:
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


def families(state: ViewState) -> Iterator[MetricFamily]:
    """Every metric of a snapshot. Pure."""
    yield from _steps(state)
    yield from _samples(state)
    yield from _workers(state)
    yield from _servers(state)
    yield from _agents(state)
    yield from _cost(state)
    pulls = state.pulls
    yield _total("pulls", "Pulls of weights that ended well", pulls.num_pulls)
    yield _total("pull_bytes", "Bytes pulled", pulls.num_bytes)
    yield _total("pull_seconds", "Time in pulls, summed", pulls.seconds)
    yield _total("pull_paused_seconds", "Time without sampling for pulls, summed", pulls.paused_s)


def _one(name: str, about: str, value: float) -> MetricFamily:
    return MetricFamily(name, about, {(): value})


def _total(name: str, about: str, value: float) -> MetricFamily:
    return MetricFamily(name, about, {(): value}, is_total=True)


def _by(
    label: str, name: str, about: str, values: Mapping[str, float], *, is_total: bool = False
) -> MetricFamily:
    return MetricFamily(name, about, {(key,): v for key, v in values.items()}, (label,), is_total)


def _steps(state: ViewState) -> Iterator[MetricFamily]:
    run = state.run
    yield _one("step", "Newest step", run.step)
    yield _one("step_target", "Last step of the run", run.step_target)
    yield _one("policy_version", "Newest version made", run.policy_version)
    tokens, samples = (sum(getattr(p, f) for p in run.steps) for f in ("num_tokens", "num_samples"))
    yield _total("trained_tokens", "Tokens, with prompts", tokens)
    yield _total("trained_samples", "Samples trained on", samples)
    yield _total("redo_drifts", "Steps done again with other weights", run.num_drifts)
    if not run.steps:
        return
    point = run.steps[-1]
    row = step_row(point).values
    own = {name: row[name] for name in ("loss", "reward", "seconds")}
    about = "Metrics of the newest step"
    yield _by("metric", "step_metric", about, {**point.metrics, **own})
    stats = {"mean": row["staleness_mean"], "max": row["staleness_max"]}
    yield _by("stat", "staleness_versions", "Of the newest step's tokens", stats)
    finished_s = point.finished_at_ms / 1000
    yield _one("step_finished_timestamp_seconds", "When the newest step was done", finished_s)


def _samples(state: ViewState) -> Iterator[MetricFamily]:
    flow, last = state.flow, state.evaluation.last
    yield _total("issued_samples", "Samples issued", flow.issued)
    about = "Lag: samples in a topic that its reader has not finished"
    yield _by("topic", "waiting_samples", about, flow.waiting)
    yield from _ages(state)
    dead = {"rollout": flow.dead_at_rollout, "logprob": flow.dead_at_logprob}
    yield _by("role", "dead_letters", "Samples set aside", dead, is_total=True)
    yield _by("reason", "dropped_groups", "Groups dropped", state.run.dropped, is_total=True)
    if last is not None:
        yield _one("evaluation_mean_reward", "Held-out rows", last.accuracy)
        yield _one("evaluation_version", "Version last evaluated", last.policy_version)


def _ages(state: ViewState) -> Iterator[MetricFamily]:
    since = {topic: at_ms / 1000 for topic, at_ms in state.oldest.items()}
    about = "Since when the training sample that waits longest in a topic does"
    yield _by("topic", "oldest_waiting_timestamp_seconds", about, since)
    claims = state.run.claims
    goals: Values = dict(objectives(claims[-1].config)) if claims else {}
    about = "How long a sample may wait in a topic by the deadlines of the role that reads it"
    yield MetricFamily("objective_seconds", about, goals, ("topic", "role"))


@lru_cache(maxsize=1)
def objectives(config: str) -> Values:
    """Seconds by topic and by the role that reads it; of a claim of another release, which names
    what we do not know, none.

    A sample waits for a slot at most as long as the one before it is sampled; a window that takes
    longer than `stall_s` ends its worker; a group that is incomplete for longer is dropped.
    """
    try:
        run = from_json(config, "the claim")
    except ConfigError:
        return {}
    limits = limits_of(run)
    found: dict[tuple[str, ...], float] = {
        (PROMPTS.name, "rollout"): 2 * limits.sample_s,
        (TRAJECTORIES.name, "logprob"): limits.stall_s,
        (SCORED.name, "trainer"): run.trainer.group_deadline_s,
    }
    return {key: seconds for key, seconds in found.items() if seconds}  # stall_s = 0: never


def _cost(state: ViewState) -> Iterator[MetricFamily]:
    found = state.cost
    if found.training_share is not None:
        about = "Seconds of steps that count, over the time since the first one began"
        yield _one("training_share", about, found.training_share)
    yield _total("sampled_tokens", "Tokens sampled, as processes count them", found.sampled_tokens)
    yield _by("cause", "tokens_in_vain", "Sampled, and trained by no step", found.in_vain)
    deaths = {role: back.deaths for role, back in found.comebacks.items()}
    about = "Processes that ended without a goodbye, and came back"
    yield _by("role", "deaths", about, deaths, is_total=True)
    seconds: dict[tuple[str, ...], float] = {
        (role, stat): value
        for role, back in found.comebacks.items()
        for stat, value in (("median", back.median_s), ("max", back.worst_s))
    }
    about = "From the last report of a process that died to the next work of its worker"
    yield MetricFamily("back_at_work_seconds", about, seconds, ("role", "stat"))


def _workers(state: ViewState) -> Iterator[MetricFamily]:
    workers = state.throughput.workers

    def each(
        name: str, about: str, values: Mapping[Any, float], *more: str, is_total: bool = False
    ) -> MetricFamily:
        return MetricFamily(f"worker_{name}", about, values, ("worker", "role", *more), is_total)

    states = {(w.worker, w.role, w.state): 1.0 for w in workers}
    yield each("state", "1 for the state of the newest report", states, "state")
    hosts = {(w.worker, w.role, w.host): 1.0 for w in workers if w.host}
    yield each("host", "1 for the host that the worker is on", hosts, "host")
    releases = {(w.worker, w.role, w.release): 1.0 for w in workers if w.release}
    yield each("release", "1 for the release of the worker's code", releases, "release")
    versions = {(w.worker, w.role): w.policy_version for w in workers}
    yield each("policy_version", "Version held; -1: none", versions)
    times = {(w.worker, w.role): w.at_ms / 1000 for w in workers}
    yield each("report_timestamp_seconds", "When the worker last reported", times)
    restarts = {(w.worker, w.role): w.restarts for w in workers}
    yield each("restarts", "Processes after the first", restarts, is_total=True)
    counts = {(w.worker, w.role, name): v for w in workers for name, v in w.totals.items()}
    about = "Counters of workers: samples, tokens and the like"
    yield each("counter", about, counts, "counter", is_total=True)
    seconds = {(w.worker, w.role, at): s for w in workers for at, s in w.seconds.items()}
    yield each("state_seconds", "Time by state", seconds, "state", is_total=True)


def _servers(state: ViewState) -> Iterator[MetricFamily]:
    loads = {
        (w.worker, one.server): one for w in state.throughput.workers for one in w.server_loads
    }
    labels = ("worker", "server")
    in_flight: Values = {key: one.in_flight for key, one in loads.items()}
    yield MetricFamily("server_in_flight", "The worker's requests at a server", in_flight, labels)
    limits: Values = {key: one.limit for key, one in loads.items()}
    yield MetricFamily("server_limit", "Limit of the requests in flight", limits, labels)
    why: Values = {(*key, one.why): 1.0 for key, one in loads.items()}
    yield MetricFamily(
        "server_limit_reason", "1 for why the limit changed last", why, (*labels, "why")
    )
    lost: Values = {key: one.num_preemptions for key, one in loads.items()}
    about = "Requests whose cache the server threw away, to compute it again"
    yield MetricFamily("server_preemptions", about, lost, labels, is_total=True)


def _agents(state: ViewState) -> Iterator[MetricFamily]:
    ended: Values = {(a.agent, kind): num for a in state.agents for kind, num in a.ended.items()}
    yield MetricFamily(
        "agent_sessions", "Sessions that closed", ended, ("agent", "kind"), is_total=True
    )
    calls = {a.agent: a.num_calls for a in state.agents}
    yield _by("agent", "agent_calls", "Calls that were sampled", calls, is_total=True)
    figures: Values = {
        (a.agent, name): value
        for a in state.agents
        for name, value in a.values.items()
        if value is not None
    }
    about = "Calls per session, call latency in seconds, percent from the log and not learnt from"
    yield MetricFamily("agent_figure", about, figures, ("agent", "figure"))
