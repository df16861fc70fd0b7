"""An address that cannot be listened on is refused by its field, not by a traceback of a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.bootstrap.served import report_listener_of
from rlstreams.workers.bootstrap.weights import weight_server
from rlstreams.workers.config.load import load
from tests.unit.roles.stand import EXAMPLE, Stand

OTHERS = "192.0.2.1"  # of a network that is for documentation
NO_NAME = "a..b"


@pytest.mark.parametrize("host", [OTHERS, NO_NAME])
def test_the_address_that_servers_report_to_is_one_of_this_host(host: str) -> None:
    """Each rollout worker listens there itself."""
    with pytest.raises(ConfigError, match=f"engine.report_host is '{host}', which is no address"):
        report_listener_of(load([EXAMPLE], [f"engine.report_host={host}"]))


@pytest.mark.parametrize("host", [OTHERS, NO_NAME])
def test_a_server_of_ours_listens_on_an_address_of_this_host(host: str) -> None:
    """A free port is looked for there."""
    with pytest.raises(ConfigError, match=f"engine.host is '{host}', which is no address of this"):
        own_urls(load([EXAMPLE], ["rollout.engine=vllm", f"engine.host={host}"]))


@pytest.mark.parametrize("host", [OTHERS, NO_NAME, "2001:db8::1"])
def test_the_trainer_serves_weights_on_an_address_of_its_host(host: str, tmp_path: Path) -> None:
    """It is asked for before the trainer claims the run."""
    stand = Stand(tmp_path, weights__channel="gloo", weights__host=host)
    with pytest.raises(ConfigError, match=f"weights.host is '{host}', which is no address of this"):
        weight_server(stand.context("trainer"))
