"""Seconds until a model server is ready, and how fast it decodes then, by what it starts with.

    python -m tests.gpu.server_start --shape qwen3-1.7b --decode 256 --out result.json \\
        --case first --case again --case fork env:VLLM_WORKER_MULTIPROC_METHOD=fork \\
        --case eager enforce-eager=true --case uncached \\
        env:PYTHONDONTWRITEBYTECODE=1 env:PYTHONPYCACHEPREFIX=/nowhere

Each case is a name and the `engine.args` on top of what a run gives, or with `env:` the
`engine.env`; servers start one behind the other by the command that a run uses, with random
weights, so the second one finds the caches that the first wrote. `ready_s`: /health answers;
`first_s`: the first request is answered; both since the start. `cpu_s`: CPU seconds of all its
processes until then. `stages_s`: when the server's log says, to the second, that a stage began or
ended. `said`: its own lines about compilation, graphs and its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from tests.gpu.engine_contract import Bench
from tests.gpu.random_model import KINDS, write
from tests.gpu.whole_run import hardware
from tests.servers.real import long_model, without_end

# Lines of a log in which a server says how long something took.
SAID = re.compile(
    r"[^\n]*(?: took |Graph capturing|Capturing|weights loading|ready in|AOT compilation)[^\n]*"
)
MOST_LINES = 24
STAMP = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
# vLLM's log: the first line with such words is of the stage.
STAGES = {
    "imported": "version",  # by the API server
    "engine begins": "Initializing a V1 LLM engine",
    "model begins": "model from scratch",
    "model ends": "Model loading took",
    "cache sized": "KV cache size",
    "graphs captured": "Graph capturing finished",
    "engine ends": "init engine",
    "listens": "Starting vLLM server",
}
START_S = 500.0
LOOK_S = 0.1
TOKENS = 512  # of a decoded answer
PROMPT = 200


async def measured(bench: Bench, num_decoded: int, started_s: float) -> dict[str, Any]:
    """Seconds of a start, and tokens a second of `num_decoded` answers side by side."""
    http, child = ServerHttp(bench.url), bench.process and bench.process.child
    assert child is not None
    try:
        while await http.status_of("/health", 5.0) != 200:
            assert child.poll() is None, "\n".join(child.log_tail())
            assert time.perf_counter() - started_s < START_S, "\n".join(child.log_tail())
            await asyncio.sleep(LOOK_S)
        found: dict[str, Any] = {"ready_s": round(time.perf_counter() - started_s, 1)}
        await _ask(http, bench.kind, 2)
        found["first_s"] = round(time.perf_counter() - started_s, 1)
        found["cpu_s"] = round(_cpu_s(child.pid), 1)
        for name in ("first_decode_s", "decode_s") if num_decoded else ():
            before_s = time.perf_counter()
            asked = (_ask(http, bench.kind, TOKENS, n) for n in range(num_decoded))
            await asyncio.gather(*asked)
            found[name] = round(time.perf_counter() - before_s, 2)
        if num_decoded:
            found["decoded_tokens_per_s"] = round(num_decoded * TOKENS / found["decode_s"])
        return found
    finally:
        await http.close()


async def _ask(http: ServerHttp, kind: Kind, num_tokens: int, number: int = 0) -> None:
    """One answer of this length; its prompt begins with its number, so none is in the cache."""
    ids = [number % 100, number // 100, *range(1, PROMPT - 1)]
    ids = [token % 128 for token in ids]
    sampling: dict[str, Any] = {"temperature": 1.0}
    if kind is Kind.VLLM:
        limits = {"max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
        body: dict[str, Any] = {"token_ids": ids, "sampling_params": sampling | limits}
        await http.post("/inference/v1/generate", body, START_S)
    else:
        limits = {"max_new_tokens": num_tokens, "ignore_eos": True}
        await http.post(
            "/generate", {"input_ids": ids, "sampling_params": sampling | limits}, START_S
        )


def _cpu_s(leader: int) -> float:
    """CPU seconds of a process group, with those of children that have ended."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def stages(text: str, began: datetime) -> Mapping[str, int]:
    """Seconds from the start to the first line of each stage in a log."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if stamp := STAMP.search(line):
            at = datetime.strptime(f"{began.year}-{stamp[1]}", "%Y-%m-%d %H:%M:%S")
            for name, words in STAGES.items():
                if words in line:
                    found.setdefault(name, round((at - began).total_seconds()))
    return found


def started(args: argparse.Namespace, name: str, words: Sequence[str]) -> dict[str, Any]:
    """One server's start: seconds until it answers, and its own account of them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = [word[4:] for word in words if word.startswith("env:")]
        args.arg = [*args.common, *(word for word in words if not word.startswith("env:"))]
        args.env = [*args.common_env, *environment]
        args.log = str((args.logs or Path(folder)) / f"{name}.log")
        Path(args.log).unlink(missing_ok=True)
        started_s, began = time.perf_counter(), datetime.now()
        bench = Bench(args, Path(folder))
        try:
            found = asyncio.run(measured(bench, args.decode, started_s))
        except (ServerError, TimeoutError, OSError, AssertionError) as err:
            found = {"error": f"{type(err).__name__}: {err}"[-1000:]}
        finally:
            bench.listener.close()
            if bench.process is not None:
                bench.process.end()
        text = Path(args.log).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip()[:300] for line in SAID.findall(text)]
    found["stages_s"] = stages(text, began)
    return {"case": name, "words": list(words), **found, "said": lines[-MOST_LINES:]}


def main(argv: Sequence[str] | None = None) -> int:
    """All cases; 1 if a server did not start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--shape", default="", choices=["", *KINDS], help="empty: the demo's model")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--common", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--env", action="append", default=[], dest="common_env", metavar="NAME=VALUE"
    )
    parser.add_argument("--case", nargs="+", action="append", metavar=("NAME", "WORD"))
    parser.add_argument("--decode", type=int, default=0, help="answers side by side, then")
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
        for name, *words in args.case or [["as-it-is"]]:
            found["cases"].append(started(args, name, words))
            text = json.dumps(found, indent=1) + "\n"
            if args.out:
                args.out.write_text(text, encoding="utf-8")
            sys.stderr.write(json.dumps(found["cases"][-1]) + "\n")
    sys.stdout.write(text)
    return int(any("error" in case for case in found["cases"]))


if __name__ == "__main__":
    sys.exit(main())
