"""Seconds until a model server is ready, by the arguments that it starts with.

    python -m tests.gpu.server_start --shape qwen3-1.7b --out result.json \\
        --case as-it-is --case again --case eager enforce-eager=true

Each case is a name and the `engine.args` on top of what a run gives; servers start one behind the
other by the command that a run uses, with random weights, so the second one finds the caches that
the first wrote. `said` has the server's own lines about compilation, graphs and its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.engine_contract import Bench
from tests.gpu.random_model import KINDS, write
from tests.gpu.whole_run import hardware
from tests.servers.real import long_model, ready, without_end

# Lines of a log in which a server says how long something took.
SAID = re.compile(r"[^\n]*(?: took |Graph capturing|Capturing|weights loading|ready in)[^\n]*")
MOST_LINES = 24


def started(args: argparse.Namespace, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """One server's start: seconds until it answers, and its own account of them."""
    with tempfile.TemporaryDirectory() as folder:
        args.arg = [*args.common, *arguments]
        args.log = str((args.logs or Path(folder)) / f"{name}.log")
        started_s = time.perf_counter()
        bench = Bench(args, Path(folder))
        try:
            assert bench.process is not None
            asyncio.run(ready(bench.url, bench.process))
            found: dict[str, Any] = {"ready_s": round(time.perf_counter() - started_s, 1)}
        except (RuntimeError, TimeoutError, OSError, AssertionError) as err:
            found = {"error": f"{type(err).__name__}: {err}"[-1000:]}
        finally:
            bench.listener.close()
            if bench.process is not None:
                bench.process.end()
        text = Path(args.log).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip()[:300] for line in SAID.findall(text)]
    return {"case": name, "args": list(arguments), **found, "said": lines[-MOST_LINES:]}


def main(argv: Sequence[str] | None = None) -> int:
    """All cases; 1 if a server did not start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--shape", default="", choices=["", *KINDS], help="empty: the demo's model")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--common", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--case", nargs="+", action="append", metavar=("NAME", "ARG=VALUE"))
    parser.add_argument("--logs", type=Path, help="an existing folder that keeps the servers' logs")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(url="", experts=False, record="")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"hardware": hardware(), "shape": args.shape, "common": args.common}
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            write(args.shape, Path(folder) / "model")
            args.model = str(without_end(Path(folder) / "model"))
        else:
            args.model = str(without_end(long_model(Path(folder) / "served")))
        found["cases"] = []
        for name, *arguments in args.case or [["as-it-is"]]:
            found["cases"].append(started(args, name, arguments))
            text = json.dumps(found, indent=1) + "\n"
            if args.out:
                args.out.write_text(text, encoding="utf-8")
            sys.stderr.write(json.dumps(found["cases"][-1]) + "\n")
    sys.stdout.write(text)
    return int(any("error" in case for case in found["cases"]))


if __name__ == "__main__":
    sys.exit(main())
