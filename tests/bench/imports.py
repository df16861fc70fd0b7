"""CPU seconds of an import, by where its bytecode is kept (infra/decisions/0101).

    python tests/bench/imports.py [--save]
    python tests/bench/imports.py --python .venv-vllm/bin/python \\
        --module vllm.entrypoints.openai.api_server --save

`forbidden`: nowhere, as in a container that sets PYTHONDONTWRITEBYTECODE and holds libraries
without bytecode; `keeping`: the first process that may keep it in a folder; `kept`: every later
one. User and system seconds of the process: a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstreams.streams.process.bytecode import FORBIDS, PLACE

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.hardware import hardware

OURS = "rlstreams.workers.bootstrap.preload"
IMPORT_S = 500.0


def cpu_s(python: str, module: str, environment: Mapping[str, str]) -> float:
    """CPU seconds of a Python that imports the module, and of what it starts for that."""
    before = os.times()
    subprocess.run(
        [python, "-c", f"import {module}"], env={**os.environ, **environment}, check=True,
        timeout=IMPORT_S, capture_output=True,
    )  # fmt: skip
    after = os.times()
    children = after.children_user + after.children_system
    return round(children - before.children_user - before.children_system, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--module", default=OURS)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="add it to results/imports-<date>.json")
    args = parser.parse_args(argv)
    found: dict[str, list[float]] = {"forbidden": [], "keeping": [], "kept": []}
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as folder:
            keeping = {FORBIDS: "", PLACE: folder}
            forbidden = {FORBIDS: "1", PLACE: str(Path(folder) / "nowhere")}
            for name, changes in (
                ("forbidden", forbidden),
                ("keeping", keeping),
                ("kept", keeping),
            ):
                found[name].append(cpu_s(args.python, args.module, changes))
    results = {args.module: {"cpu_s": found, "hardware": hardware()}}
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if args.save:
        file = Path(__file__).with_name("results") / f"imports-{time.strftime('%Y-%m-%d')}.json"
        before = json.loads(file.read_text("utf-8")) if file.exists() else {}
        file.write_text(json.dumps(before | results, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
