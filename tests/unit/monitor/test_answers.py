"""Records in, JSON out."""

from __future__ import annotations

import sys

import pytest

from rlstreams.schemas.events import Event
from rlstreams.show.monitor.answers import SMALL, Monitor
from rlstreams.show.monitor.app import serve
from rlstreams.show.monitor.health import HealthWatch
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.parts import Message, whole
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import STEPS, Retention
from rlstreams.workers.config.run import RunConfig, RunSection
from tests import factories


def message(event: Event, offset: int) -> Message:
    sent = outgoing(STEPS, event)
    return Message(Partition(STEPS.name, 0), offset, sent.key, whole(sent.value), {}, 0)


def test_what_is_read_again_counts_once() -> None:
    """A client without committed offsets begins anew when it has to join its group again."""
    monitor = Monitor("run", HealthWatch(RunConfig()))
    drops = [message(factories.groups_dropped(), offset) for offset in (0, 2)]
    for one in (*drops, *drops):
        monitor.take(one)

    assert 2 == monitor.windows()[1]["records"]


def test_what_cannot_be_read_is_counted() -> None:
    """The role that consumes it sets it aside; here it stops nobody."""
    monitor = Monitor("run", HealthWatch(RunConfig()))
    monitor.take(Message(Partition(STEPS.name, 0), 0, b"", b"no event", {}, 0))

    assert (0, 1) == tuple(monitor.windows()[1][name] for name in ("records", "unreadable"))


def test_topics_with_payloads_are_not_read() -> None:
    """They may have gigabytes, and Faust buffers messages by number."""
    names = {topic.name for topic in SMALL}

    assert not names & {"prompts", "trajectories", "scored-trajectories"}
    assert Retention.PAYLOAD not in {topic.retention for topic in SMALL}


def test_without_faust_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, instead of an ImportError."""
    monkeypatch.setitem(sys.modules, "faust", None)
    config = RunConfig(run=RunSection(id="run"))

    with pytest.raises(ConfigError, match=r"pip install 'rlstreams\[monitor\]'"):
        serve(config, "127.0.0.1:1", {}, {}, host="127.0.0.1", port=0, say=print)
