"""A stand-in server as a process of its own: `python -m tests.servers.serve FLAVOUR PORT [how]`."""

from __future__ import annotations

import sys
import time

from tests.servers.fake_server import FakeServer

if __name__ == "__main__":
    flavour, port, *how = sys.argv[1:]
    if "fails" in how:
        print("no room on the device", file=sys.stderr)  # noqa: T201
        sys.exit(3)
    server = FakeServer(flavour, port=int(port))
    while True:
        time.sleep(60)
