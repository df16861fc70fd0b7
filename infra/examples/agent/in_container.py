"""Runs an agent's command in a container that reaches the gateway and ends with its session.

    [[agent]]
    command = ["python", "in_container.py", "--image", "my/agent", "--", "python", "/solver.py"]

The standard library, and `docker` or `podman`. The image needs `/bin/sh` and `cat`.

Nothing has to be cleaned up, whoever is killed. The container's standard input is a pipe that this
process holds: when it ends, or is killed, a watcher inside reads its end and ends the container,
which is removed. The worker ends this process with the session, and dies with it.

With `--network NAME` of an internal network (`docker network create --internal NAME`) the container
reaches this host's address on that network, and nothing behind it: this process listens there, and
passes on to the gateway. Who listens on all of this host's addresses is reached too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

TASK = "/rlstreams/task.json"
NAMED = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL",
         "ANTHROPIC_API_KEY", "NO_PROXY")  # fmt: skip
URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL")
# Process 1: the command, and a watcher that ends both when nobody holds the input any more.
WATCHED = """exec 3<&0
"$@" 3<&- </dev/null &
agent=$!
(cat <&3 >/dev/null; kill -9 $agent) 2>/dev/null &
exec 3<&-
wait $agent"""


def main() -> int:
    """The status that the command ended with."""
    args = parsed()
    engine = next(filter(None, map(shutil.which, (args.engine or "docker", "podman"))), None)
    if engine is None:
        sys.exit("in_container.py: there is neither docker nor podman here")
    variables = {name: os.environ[name] for name in NAMED if name in os.environ}
    if args.network != "host":
        variables |= passed_on(variables, address_of(engine, args.network))
    command = [
        *(engine, "run", "--rm", "--interactive", "--network", args.network),
        *("--memory", args.memory, "--pids-limit", str(args.pids), "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--label", "rlstreams.agent"),
        *(
            "--volume",
            f"{os.environ['RLSTREAMS_TASK']}:{TASK}:ro",
            "--env",
            f"RLSTREAMS_TASK={TASK}",
        ),
        # By name: what their values are stands on no command line.
        *(word for name in (*variables, *args.env) for word in ("--env", name)),
        *("--entrypoint", "/bin/sh", args.image, "-c", WATCHED, "sh", *args.command),
    ]
    held, ours = os.pipe()  # `ours` stays open as long as this process lives
    run = subprocess.Popen(command, stdin=held, env={**os.environ, **variables})
    os.close(held)
    status = run.wait()
    os.close(ours)
    return status


def parsed() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description="An agent's command in a container.")
    parser.add_argument("--image", required=True)
    parser.add_argument("--engine", default="", help="docker, podman, or a path")
    parser.add_argument("--network", default="host", help="host, or the name of an internal one")
    parser.add_argument("--memory", default="4g")
    parser.add_argument("--pids", type=int, default=512)
    parser.add_argument("--env", action="append", default=[], help="a further variable, by name")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def address_of(engine: str, network: str) -> str:
    """This host's address on a network."""
    asked = [
        engine,
        "network",
        "inspect",
        "--format",
        "{{(index .IPAM.Config 0).Gateway}}",
        network,
    ]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def passed_on(variables: dict[str, str], address: str) -> dict[str, str]:
    """The same addresses of the gateway, as the container reaches them."""
    gateway = urlsplit(variables["ANTHROPIC_BASE_URL"])
    listener = socket.create_server((address, 0))
    threading.Thread(
        target=serve, args=(listener, gateway.hostname, gateway.port), daemon=True
    ).start()
    here = f"{address}:{listener.getsockname()[1]}"
    there = {
        name: variables[name].replace(gateway.netloc, here) for name in URLS if name in variables
    }
    return {**there, "NO_PROXY": address}


def serve(listener: socket.socket, host: str, port: int) -> None:
    """Connect each that comes with the gateway."""
    while True:
        peer, _ = listener.accept()
        try:
            gateway = socket.create_connection((host, port))
        except OSError:
            peer.close()
            continue
        for pair in ((peer, gateway), (gateway, peer)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """All that comes, until either end is gone."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


if __name__ == "__main__":
    sys.exit(main())
