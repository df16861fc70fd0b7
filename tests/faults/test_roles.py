"""A rollout worker over a network that fails: no sample is lost or doubled."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlstreams.workers.loop.runtime import Exit
from tests.faults.proxied import Proxied
from tests.faults.proxy import Weather
from tests.integration.test_roles_on_broker import Site, end

NUM_GROUPS = 150
MORE = 25  # samples that are done in each weather, so several commits
FEW = 5  # samples after each of several rounds
CUTS_S, CUT_EVERY_S = 1.5, 0.2
STORM = (
    Weather(delay_s=0.25),  # 500 ms there and back
    Weather(bytes_per_s=100_000.0),
)


def test_a_worker_in_bad_weather(proxied: Proxied, run_id: str, tmp_path: Path) -> None:
    """Delayed, throttled, cut and half-closed while it works: every sample is there once."""
    site = Site(proxied.bootstrap, run_id, tmp_path, num_groups=NUM_GROUPS)
    with site.worker() as process:
        site.wait_for(MORE)
        for weather in STORM:
            proxied.proxy.hurt(weather)
            site.wait_for(len(site.found()) + MORE)
        proxied.proxy.calm()
        for hurt in (proxied.proxy.cut, proxied.proxy.half_close, proxied.proxy.cut):
            hurt()
            site.wait_for(len(site.found()) + MORE)
        assert len(site.found()) < len(site.samples), "the weather came too late to mean anything"
        site.wait_for(len(site.samples))
        assert Exit.DONE == end(process)
    site.check()
    site.close()


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_every_round_of_cuts_is_followed_by_a_recovery(
    proxied: Proxied, run_id: str, tmp_path: Path, rounds: int
) -> None:
    """All connections are cut again and again, for longer than the client's pause between two
    tries; each time the work goes on as soon as they hold."""
    site = Site(proxied.bootstrap, run_id, tmp_path, num_groups=NUM_GROUPS)
    with site.worker() as process:
        site.wait_for(FEW)
        for _ in range(rounds):
            until_s = time.monotonic() + CUTS_S
            while time.monotonic() < until_s:
                proxied.proxy.cut()
                time.sleep(CUT_EVERY_S)
            site.wait_for(len(site.found()) + FEW)
        assert len(site.found()) < len(site.samples), "the cuts came too late to mean anything"
        site.wait_for(len(site.samples))
        assert Exit.DONE == end(process)
    site.check()
    site.close()
