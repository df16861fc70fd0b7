"""What a rollout worker costs beside a bare client of the same vLLM server, on a GPU.

    python -m tests.gpu.rollout_overhead --slots 64 --samples 512 --tokens 256 --json out.json

`tests/bench/rollout_overhead.py` with a server on a GPU and cores to itself; answers have a fixed
length, for a GPU's sampling depends on who shares a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.bench.rollout_overhead import add_options, measure, report
from tests.gpu.engine_contract import Bench
from tests.servers.real import long_model, ready, without_end


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--log", default="engine.log")
    parser.set_defaults(kind="vllm", url="", experts=False, record="", fixed=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args.model = str(without_end(long_model(folder / "served")))
        bench = Bench(args, folder)
        try:
            assert bench.process is not None
            asyncio.run(ready(bench.url, bench.process))
            report(measure(bench.url, folder, args), args.json)
        finally:
            bench.listener.close()
            if bench.process is not None:
                bench.process.close()


if __name__ == "__main__":
    main()
