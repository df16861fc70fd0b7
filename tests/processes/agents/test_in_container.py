"""`infra/examples/agent/in_container.py`: what the container is given, and that it ends."""

from __future__ import annotations

import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.docker
SCRIPT = Path(__file__).parents[3] / "infra/examples/agent/in_container.py"
LIMIT_S = 60.0
PROGRAMS = ("bash", "cat", "sleep")
# An agent of a shell alone: it says what it was given, and posts it to the gateway.
AGENT = r"""
task=$(cat $RLSTREAMS_TASK); where=${OPENAI_BASE_URL#http://}; where=${where%/v1}
body="$task $OPENAI_API_KEY $MINE"
exec 3<>/dev/tcp/${where%:*}/${where#*:}
printf 'POST /v1/said HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body" >&3
read -r answer <&3; echo "$answer"
"""


def docker(*words: str, **options: Any) -> str:
    made = subprocess.run(
        ["docker", *words], check=True, capture_output=True, timeout=LIMIT_S, **options
    )
    return made.stdout.decode().strip()


def needed(program: str) -> list[str]:
    """Libraries of a program, and what loads them."""
    made = subprocess.run(["ldd", program], check=True, capture_output=True, text=True)
    return [word for word in made.stdout.split() if word.startswith("/")]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A shell of this machine with what it needs, and nothing else."""
    try:
        docker("info")
    except (OSError, subprocess.SubprocessError) as err:
        pytest.skip(f"no Docker engine answers: {err}")
    files = [shutil.which(name) or "" for name in PROGRAMS]
    linked = [word for file in files for word in needed(file)]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        places = {place for file in (*files, *linked, "/bin/sh") for place in Path(file).parents}
        for place in sorted(places)[1:]:
            folder = tarfile.TarInfo(str(place))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for file in {*files, *linked}:
            tar.add(os.path.realpath(file), arcname=file)
        tar.add(os.path.realpath(files[0]), arcname="/bin/sh")
    name = f"rlstreams-test-{uuid.uuid4().hex}"
    docker("import", "-", name, input=packed.getvalue())
    yield name
    docker("image", "rm", "--force", name)


@pytest.fixture
def said() -> Iterator[tuple[str, list[str]]]:
    """A gateway's address, and what was posted to it."""
    heard: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", heard
    server.shutdown()
    server.server_close()


def begun(folder: Path, image: str, url: str, agent: str, *words: str) -> subprocess.Popen[bytes]:
    """As a rollout worker starts it."""
    task = folder / "task.json"
    task.write_text(json.dumps({"prompt": "a task"}))
    given = {
        "OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "OPENAI_API_KEY": "the-key",
        "RLSTREAMS_TASK": str(task), "MINE": "a word", "HIDDEN": "of the worker",
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--image", image, "--pids", "32", "--memory", "64m"]
    command += ["--env", "MINE", *words, "--", "bash", "-c", agent]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **given})


@pytest.fixture(params=["host", "internal"])
def network(request: pytest.FixtureRequest, image: str) -> Iterator[str]:
    if request.param == "host":
        yield "host"
        return
    name = f"rlstreams-test-{uuid.uuid4().hex[:12]}"
    docker("network", "create", "--internal", name)
    yield name
    docker("network", "rm", name)


def test_it_is_given_its_task_and_the_gateway(
    tmp_path: Path, image: str, said: tuple[str, list[str]], network: str
) -> None:
    """And its status is the command's; nothing of the worker's environment is in it, and on a
    network of its own nothing of this host's loopback."""
    url, heard = said
    port = url.rpartition(":")[2]
    probe = f'echo "$HIDDEN"; echo > /dev/tcp/127.0.0.1/{port} && echo loopback; exit 7'
    made = begun(tmp_path, image, url, AGENT + probe, "--network", network)
    output, _ = made.communicate(timeout=LIMIT_S)
    assert heard == ['{"prompt": "a task"} the-key a word']
    assert (made.returncode, b"200" in output, b"of the worker" in output) == (7, True, False)
    assert (b"loopback" in output) == (network == "host")


@pytest.mark.parametrize("whom", ["it", "its client"])
def test_it_ends_with_whoever_is_killed(
    tmp_path: Path, image: str, said: tuple[str, list[str]], whom: str
) -> None:
    """Also what it started itself; and the container is removed."""
    begin = "bash -c 'trap \"\" HUP TERM; sleep 600' & " + AGENT + "sleep 600"
    made = begun(tmp_path, image, said[0], begin)
    until(lambda: said[1], "it said nothing")
    (name,) = docker("ps", "--quiet", "--filter", f"ancestor={image}").split()
    limits = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", name))
    assert (limits["PidsLimit"], limits["Memory"], limits["CapDrop"]) == (32, 64 << 20, ["ALL"])
    if whom == "it":
        made.kill()
    else:
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
    until(lambda: not docker("ps", "--all", "--quiet", "--filter", f"ancestor={image}"), "it lives")
    made.kill()
    made.wait(LIMIT_S)
    assert made.stdout is not None
    made.stdout.close()


def until(seen: Any, why: str) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < until_s, why
        time.sleep(0.1)
