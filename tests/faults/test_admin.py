"""Administration while a node refuses connections that the cluster still names."""

from __future__ import annotations

import threading
import time

import pytest
from kafka.admin import KafkaAdminClient

from rlstreams.streams.kafka.admin_ask import NO_OPTIONS, asked
from rlstreams.streams.log.errors import BrokerError
from tests.faults.proxied import Proxied
from tests.faults.proxy import Weather


def refuse(proxied: Proxied) -> None:
    """The node dies: its connections are reset and no new one lives."""
    proxied.proxy.hurt(Weather(refuse=True))
    proxied.proxy.cut()


def test_a_node_that_refuses_for_a_moment_is_asked_again(proxied: Proxied) -> None:
    """As right after a kill, until another node answers for it."""
    tries: list[float] = []

    def ask(admin: KafkaAdminClient) -> str:
        tries.append(time.monotonic())
        if len(tries) == 1:
            refuse(proxied)
            threading.Timer(0.5, proxied.proxy.calm).start()
        return str(admin.describe_cluster()["cluster_id"])

    assert asked(proxied.bootstrap, NO_OPTIONS, ask)
    assert len(tries) > 1


def test_a_node_that_refuses_for_good_ends_the_question(proxied: Proxied) -> None:
    """Once the time for trying again is over."""

    def ask(admin: KafkaAdminClient) -> object:
        refuse(proxied)
        return admin.describe_cluster()

    with pytest.raises(BrokerError, match=r"a node is unreachable: .*, and so for 0 s"):
        asked(proxied.bootstrap, NO_OPTIONS, ask, within_s=0)
