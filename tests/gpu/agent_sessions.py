"""Tokens a second of agents at a run's gateway, beside the same clients at the bare server.

    python -m tests.gpu.agent_sessions --sessions 512 --out agents.json           # one GPU of 80 GB
    python -m tests.gpu.agent_sessions --demo --cpu --sessions 8 --tokens 48 --out cpu.json

A vLLM server, and `rlstreams up` with it as `engine.urls`, a broker and a remote agent: each
session is issued, each of its calls in Kafka before it is answered, its outcome and close too. No
step is trained: a batch would take more samples than there are. The clients are processes without
rlstreams (`agent_client.py`), each session has `--turns` of a quarter to all of `--tokens` tokens,
and takes the next when it is done. Both sides, in turns on the same server: messages through the
gateway, and token ids straight to the server's own route, as the gateway asks it (seeds,
log-probs), with the turns before as ids. Counted are tokens of answers that end within the window,
by the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstreams import open_run
from rlstreams.streams.audit.auditor import audit
from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import GenerateRequest
from tests.bench.hardware import hardware as processors
from tests.bench.rollout_overhead import NO_RECORDS
from tests.gpu.engine_contract import Bench
from tests.gpu.qwen3 import SHAPES
from tests.gpu.result import kept
from tests.gpu.whole_run import hardware, run_it, tails
from tests.gpu.workload import write_folder, write_prompts
from tests.servers.real import long_model, ready, without_end

GOAL = 0.97
SIDES = ("server", "gateway")
CLIENT = Path(__file__).with_name("agent_client.py")
START_S = 180.0
GROUP = 8
CONFIG = """
[run]
id = "sessions"
dir = "{folder}/{{id}}"

[data]
train = "{folder}/train.jsonl"

[model]
path = "{model}"
dtype = "{dtype}"

[prompts]
group_size = 8
evaluate_every = 0

[rollout]
engine = "vllm"
slots = {slots}
workers = {workers}
max_new_tokens = {tokens}
capture_experts = false
sample_deadline_s = 1200.0

[engine]
urls = ["{url}"]
max_running = {slots}

[[agent]]
name = "client"
remote = true
max_calls = 1000
timeout_s = 1000.0

[reward]
verifier = "agent"

[logprob]
place = "off"

[trainer]
device = "{device}"
steps = 1
groups_per_step = 4096 # never full
group_deadline_s = 3000.0

[trainer.loss]
proximal = "behavior"
correction = "none"

[weights]
channel = "file"

[deadlines]
stall_s = 3600.0
"""


def configured(folder: Path, url: str, args: argparse.Namespace) -> Path:
    """The run's file."""
    text = CONFIG.format(
        folder=folder,
        url=url,
        model=args.model,
        dtype="float32" if args.cpu else "bfloat16",
        device="cpu" if args.cpu else "cuda:0",
        slots=args.sessions,
        workers=1,
        tokens=args.tokens,
    )
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def words_of(model: Path) -> dict[str, int]:
    """A word for each token, so that a text has as many tokens as words."""
    core = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return {word: number for word, number in core["vocab"].items() if number > 3 and word.isalnum()}


def asked(side: str, url: str, runner: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What all clients of a side are told, but for their number."""
    words = words_of(args.model)
    spec = {
        "turns": args.turns, "prompt": args.prompt, "tokens": args.tokens, "words": [*words],
        "ids": [*words.values()],
    }  # fmt: skip
    if side == "gateway":
        return spec | {"runners": [str(runner)]}
    adapter = VllmAdapter(ServerHttp(url), NO_RECORDS, START_S)
    request = GenerateRequest(
        request_id="", token_ids=[], max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=0, seed=0,
        stop_token_ids=[], experts_start=None, salt="server",
    )  # fmt: skip
    return spec | {"url": url + adapter.generate_route, "body": adapter.body(request)}


def measured(spec: dict[str, Any], seed: str, args: argparse.Namespace) -> dict[str, Any]:
    """A round of one side: its clients, and what they counted."""
    until_s = time.time() + args.warm_s + args.window_s
    with tempfile.TemporaryDirectory() as name:
        running = []
        for number in range(args.processes):
            share = args.sessions // args.processes + (number < args.sessions % args.processes)
            own = spec | {"sessions": share, "seed": f"{seed}/{number}", "until_s": until_s}
            paths = Path(name) / f"{number}.json", Path(name) / f"{number}.out"
            paths[0].write_text(json.dumps(own))
            command = [sys.executable, str(CLIENT), *map(str, paths)]
            running.append((subprocess.Popen(command), paths[1]))
        for process, _ in running:
            status = process.wait(args.warm_s + args.window_s + START_S)
            if status:
                raise RuntimeError(f"a client ended with status {status}")
        told = [json.loads(path.read_text()) for _, path in running]
    calls = [call for one in told for call in one["calls"]]
    inside = [call for call in calls if until_s - args.window_s < call[0] <= until_s]
    seconds = sorted(call[1] for call in inside)
    again: dict[str, int] = {}
    for one in told:
        for key, number in one["again"].items():
            again[key] = again.get(key, 0) + number
    return {
        "tokens_per_s": round(sum(call[2] for call in inside) / args.window_s, 1),
        "calls_per_s": round(len(inside) / args.window_s, 2),
        "call_s_p50": round(statistics.median(seconds), 3) if seconds else None,
        "call_s_p95": round(seconds[int(0.95 * len(seconds))], 3) if seconds else None,
        "sessions": sum(one["sessions"] for one in told),
        "told_to_come_again": again,
        "clients_cpu_s": round(sum(one["cpu_s"] for one in told), 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def compare(url: str, folder: Path, told: dict[str, Any], args: argparse.Namespace) -> None:
    """Both sides in turns, while a run waits for its agents."""
    file, run = configured(folder, url, args), folder / "sessions"
    words = [f"broker.jars_dir={args.jars}"] if args.jars else []
    enough, status = threading.Event(), list[int]()
    limit_s = 10_000.0

    def runs() -> None:
        status.append(run_it([file], words, run, limit_s, enough=enough))

    thread = threading.Thread(target=runs)
    thread.start()
    try:
        runner = run / "agents/rollout-0/client/runner.json"
        until_s = time.monotonic() + START_S
        while not runner.exists():
            if status or time.monotonic() > until_s:
                raise TimeoutError(f"{runner} was not written:\n{tails(run)}")
            time.sleep(0.5)
        # The server's first requests compile, and the run starts meanwhile: not counted.
        first = argparse.Namespace(**vars(args) | {"warm_s": 0.0, "window_s": args.warm_s})
        measured(asked("server", url, runner, args), "first", first)
        for number in range(args.rounds):
            for side in reversed(SIDES) if number % 2 else SIDES:
                found = measured(asked(side, url, runner, args), f"{side}/{number}", args)
                told.setdefault(side, []).append(found)
                sys.stdout.write(f"{side} {json.dumps(found)}\n")
                sys.stdout.flush()
    finally:
        enough.set()
        thread.join()
    told["status"] = status[0]
    rates = {side: statistics.median(row["tokens_per_s"] for row in told[side]) for side in SIDES}
    told["ratio"], told["goal"] = round(rates["gateway"] / rates["server"], 4), GOAL
    with open_run(run) as log:
        calls = sum(len(session.calls) for session in log.sessions())
        told |= {"calls_in_the_log": calls, "audit_ok": audit(log.bus).ok}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.7b", choices=SHAPES)
    parser.add_argument("--demo", action="store_true", help="the demo's model instead")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--sessions", type=int, default=512, help="at once")
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens; later turns have a tenth")
    parser.add_argument("--tokens", type=int, default=384, help="of an answer, at most")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--warm-s", type=float, default=30.0)
    parser.add_argument("--window-s", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="of the server")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--folder", type=Path, help="without: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    length = args.prompt + args.turns * (args.tokens + args.prompt // 10 + 8)
    args.arg += [f"max-num-seqs={args.sessions}", f"max-model-len={length + 64}"]
    args.kind, args.url, args.experts, args.record = "vllm", "", False, ""
    return args


def written(folder: Path, args: argparse.Namespace) -> None:
    """The model and the rows, of which each is a session without a word of its own."""
    if args.demo:
        args.model = without_end(long_model(folder / "served"))
    else:
        args.model = write_folder(folder / "model", args.shape, args.vocabulary)
    write_prompts(folder / "train.jsonl", rows=8192, tokens=8, vocabulary=100)


def main(argv: Sequence[str] | None = None) -> int:
    """Start, compare, write; 1 below the goal."""
    args = parse(argv)
    folder = (args.folder or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    args.log = str(folder / "server.log")
    try:
        with kept(args.out, args.limit_s) as told:
            told |= {"hardware": hardware(), "processors": processors()}
            names = ("shape", "demo", "sessions", "processes", "turns", "prompt", "tokens")
            told |= {name: getattr(args, name) for name in names}
            written(folder, args)
            bench = Bench(args, folder)
            try:
                assert bench.process is not None
                asyncio.run(ready(bench.url, bench.process))
                compare(bench.url, folder, told, args)
            finally:
                bench.listener.close()
                if bench.process is not None:
                    bench.process.end()
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return int(told["ratio"] < GOAL)


if __name__ == "__main__":
    sys.exit(main())
