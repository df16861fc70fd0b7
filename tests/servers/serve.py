"""A stand-in server as a process of its own: `python -m tests.servers.serve FLAVOUR PORT`."""

from __future__ import annotations

import sys
import time

from tests.servers.fake_server import FakeServer

if __name__ == "__main__":
    flavour, port = sys.argv[1:]
    server = FakeServer(flavour, port=int(port))
    while True:
        time.sleep(3600)
