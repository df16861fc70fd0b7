"""A rollout worker over a network that fails: no sample is lost or doubled."""

from __future__ import annotations

from pathlib import Path

from rlstreams.workers.loop.runtime import Exit
from tests.faults.proxied import Proxied
from tests.faults.proxy import Weather
from tests.integration.test_roles_on_broker import Site, end

NUM_GROUPS = 150
MORE = 25  # samples that are done in each weather, so several commits
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
