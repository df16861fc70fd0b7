"""A trainer's second rank in another network namespace: a host with an interface of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.workers.compute.hosts import Hosts, fingerprint, versions
from rlstreams.workers.compute.link import CUT_OFF_S
from rlstreams.workers.compute.team import FollowerError, Team
from rlstreams.workers.config.trainer import LayoutSection
from tests.containers import ROOT, wait_until
from tests.e2e.command import CONFIG
from tests.heavy.trainer.parallel_stand import (
    SECRET,
    batch_of,
    hashes,
    leave,
    make_model,
    two_ranks,
)

# Tests that run beside each other need networks of their own.
NET = f"10.213.{100 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"
OURS, THEIRS, PORT = f"{NET}.1", f"{NET}.2", 29400
SILENT_S = 8.0
LIMIT_S = 20.0


def ip(words: str) -> str:
    """`ip` of iproute2; gives what it complains about."""
    try:
        done = subprocess.run(["ip", *words.split()], check=False, capture_output=True, text=True)
    except FileNotFoundError as err:
        return str(err)
    return done.stderr.strip()


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another namespace and a cable to it; the name of both."""
    name = f"rl{os.getpid()}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # as rank 0 sets it; no other test has this one
    if why := ip(f"netns add {name}") or ip(f"link add {name} type veth peer eth0 netns {name}"):
        ip(f"netns del {name}")
        pytest.skip(f"no network of two hosts can be made here: {why}")
    assert not ip(f"addr add {OURS}/24 dev {name}")
    assert not ip(f"link set {name} up")
    assert not ip(f"-n {name} addr add {THEIRS}/24 dev eth0")
    assert not ip(f"-n {name} link set eth0 up")
    yield name
    ip(f"link del {name}")  # with the namespace it would go later
    ip(f"netns del {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the other host writes."""
    return tmp_path / "ranks.log"


@pytest.fixture
def hosts(cable: str, folder: Path, log: Path) -> Iterator[Hosts]:
    """The other one, with what serves its ranks."""
    address = f"{THEIRS}:{PORT}"
    command = ["ip", "netns", "exec", cable, sys.executable, "-m", "rlstreams", "worker", "ranks"]
    asked = ["--trainer.ranks=2", f'--trainer.hosts=["{address}"]', f"--model.path={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SECRET": SECRET}
    with log.open("wb") as output:
        serving = subprocess.Popen(
            [*command, str(ROOT / CONFIG), *asked, "--weights.secret=env:SECRET"],
            stderr=output, cwd=log.parent, env=environment,
        )  # fmt: skip
    yield Hosts(
        addresses=[address], ranks=1, secret=SECRET, device="cpu", versions=versions(),
        model=fingerprint(folder),
    )  # fmt: skip
    serving.kill()
    serving.wait()


BACKENDS: list[dict[str, object]] = [{}]
if find_spec("megatron"):  # which needs Python 3.12
    BACKENDS.append({"backend": "megatron", "layout": LayoutSection(ep=2)})


@pytest.mark.slow
def test_a_rank_behind_a_network_gives_the_bits_of_one_here(folder: Path, hosts: Hosts) -> None:
    """Each rank is found by the address of its own interface, whoever makes the groups."""
    found = []
    for here, there in (([""], None), ([], hosts)):
        with closing(Team(here, hosts=there)) as team:
            for asked in BACKENDS:
                two = two_ranks(folder, team=team, **asked)
                two.learner.step(batch_of(0))
                found.append(hashes(two))
                leave(two)
    first, second = found[: len(BACKENDS)], found[len(BACKENDS) :]
    assert first == second
    assert len(set(first)) == len(BACKENDS)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_ends_its_rank_by_itself(
    folder: Path, hosts: Hosts, cable: str, log: Path
) -> None:
    """It serves the next trainer once it is back."""
    with closing(two_ranks(folder, hosts=hosts)) as two:
        team = two.learner.mesh.team
        assert team is not None
        team._silent_s = SILENT_S
        ip(f"link set {cable} down")
        begun_s = time.monotonic()
        told = rf"rank 1 of the trainer \(on {THEIRS}:{PORT}\) has said nothing for 8 s"
        with pytest.raises(FollowerError, match=told):
            two.learner.step(batch_of(1))
        assert time.monotonic() - begun_s < 2 * SILENT_S
    wait_until(lambda: "rank_ended" in log.read_text("utf-8"), CUT_OFF_S + LIMIT_S, "its end")
    ip(f"link set {cable} up")
    with closing(two_ranks(folder, hosts=hosts)) as two:
        two.learner.step(batch_of(0))
