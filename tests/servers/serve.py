"""A stand-in server as a process of its own: `python -m tests.servers.serve FLAVOUR PORT [FILE]`.

While FILE is there the server hangs of the first load, and takes the file away.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.servers.fake_server import FakeServer

if __name__ == "__main__":
    flavour, port, *files = sys.argv[1:]
    server = FakeServer(flavour, port=int(port))
    for file in map(Path, files):
        while not server.is_stuck:
            server.hangs_of_loading = file.exists()
            time.sleep(0.005)
        file.unlink(missing_ok=True)
    while True:
        time.sleep(3600)
