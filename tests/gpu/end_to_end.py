"""Seconds a step, end to end, beside TRL's asynchronous trainer: one machine, the same work.

    python -m tests.gpu.end_to_end --out results                   # two GPUs of 80 GB, all cases
    python -m tests.gpu.end_to_end --cases auto,sampler --within-s 570 --out results
    python -m tests.gpu.end_to_end --shape 0.6b --tokens 512 --samples 128 --one-gpu --cases auto
    python -m tests.gpu.end_to_end --cases auto --shape tiny --cpu --steps 3      # no GPU

A Qwen3 of a published shape with random weights (`workload.py`), groups of 8, answers of one
length, or with `--longest 8192` of lognormal ones with that mean (`lognormal_agent.py`: an agent
with one call, for ours alone); GPU 0 trains, GPU 1 samples. Ours runs as
infra/examples/gsm8k-2gpu.toml has it, but for where log-probs are computed: `auto` as the example
has it, on the trainer's GPU; `sampler` by a log-prob worker on the server's; `halves` by one on
each; `trainer` by the trainer, which TRL does not do; `off` by nobody. `trl` is TRL with its
defaults (float32 weights, gradient checkpointing), `trl-tuned` with bfloat16 weights and without.
Words behind `--` are further overrides of ours.

Each case has a result file in `--out`; one that did not come to its end, or whose audit is not
clean, is named `unfinished` and costs the others nothing. The first two gaps between steps are
start-up and are left out. TRL throws stale samples away and forwards a group's prompt once: compare
samples trained a second. It needs `trl`, `datasets` and vLLM beside our own requirements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlstreams.cli.named import opened_run
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.log.errors import StreamsError
from rlstreams.workers.config.load import load
from tests.gpu.qwen3 import SHAPES
from tests.gpu.timeline import table as lines_of
from tests.gpu.timeline import timeline_of
from tests.gpu.whole_run import hardware, run_it, tails, told_by_the_log
from tests.gpu.workload import write_folder, write_prompts

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "infra" / "examples" / "gsm8k-2gpu.toml"
OVERLAY = HERE / "end_to_end.toml"
NOBODY = ["logprob.place=off", "trainer.loss.proximal=behavior", "trainer.loss.correction=none"]
OURS = {
    "auto": [],
    "sampler": ["logprob.device=cuda:1", "engine.args.gpu-memory-utilization=0.6"],
    "halves": [
        "logprob.device=cuda:0",
        "logprob.workers=2",
        "engine.args.gpu-memory-utilization=0.6",
    ],
    "trainer": ["logprob.place=trainer", "trainer.loss.proximal=step_start"],
    "off": NOBODY,
}
PEERS = {
    "trl": {"dtype": "float32", "gradient_checkpointing": True},
    "trl-tuned": {"dtype": "bfloat16", "gradient_checkpointing": False},
}
CASES = ("auto", "sampler", "off", "trainer", "trl-tuned")
LONG = ("timeline", "states_s", "pulls", "overrides", "ends_s")
AGENT = HERE / "lognormal_agent.py"
LOGNORMAL = """
[[agent]]
python = "{file}:answer"
options = {{ mean = {mean}, longest = {longest} }}

[reward]
verifier = "agent"
options = {{}}
"""
GROUP = 8
CARDS = "0,1"
START_UP = 2  # gaps between steps that are left out
START_S = 240.0  # of TRL's server
SERVED_BY_TRL = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1", "NCCL_CUMEM_ENABLE": "0"}


def overrides_of(args: argparse.Namespace, folder: Path, case: str) -> list[str]:
    """What the work, and a case of ours, ask of the example."""
    length = args.prompt + (args.longest or args.tokens)
    words = [
        f"run.id={case}",
        f"run.dir={folder}/runs/{{id}}",
        f"data.train={folder}/train.jsonl",
        f"model.path={folder}/model",
        f"rollout.max_new_tokens={args.longest or args.tokens}",
        f"trainer.groups_per_step={args.samples // GROUP}",
        f"trainer.steps={args.steps}",
        f"engine.args.max-model-len={max(2048, length + 8)}",
    ]
    words += [f"broker.jars_dir={args.jars}"] if args.jars else []
    words += OURS[case]
    if args.cards != CARDS:  # two of more: to the roles `cuda:0` and `cuda:1`
        words += [f"engine.env.CUDA_VISIBLE_DEVICES={args.cards.split(',')[1]}"]
    if args.one_gpu:
        words += ["engine.env.CUDA_VISIBLE_DEVICES=0", "logprob.device=cuda:0"]
        words += ["engine.args.gpu-memory-utilization=0.4"]
    if args.cpu:
        words += ["rollout.engine=builtin", "logprob.device=cpu", "trainer.device=cpu"]
        words += ["weights.channel=file", "model.dtype=float32", "rollout.slots=32"]
    return [*words, *(word.removeprefix("--") for word in args.overrides)]


def rlstreams(args: argparse.Namespace, folder: Path, case: str) -> dict[str, Any]:
    """`rlstreams up`, and what its log says."""
    words, files = overrides_of(args, folder, case), [EXAMPLE, OVERLAY]
    if args.longest:
        files.append(folder / "lognormal.toml")
        text = LOGNORMAL.format(file=AGENT, mean=args.tokens, longest=args.longest)
        files[-1].write_text(text, encoding="utf-8")
    config = load(files, words)
    started_s = time.time()
    status = run_it(files, words, Path(config.folder), args.limit_s)
    try:
        found = told_by_the_log(config)
        with opened_run(config) as log:
            timeline = timeline_of(log.bus)
    finally:
        if status:
            sys.stdout.write(tails(Path(config.folder)) + "\n")
    keys = ("train_s", "states_s", "not_training_share", "mismatch_mean", "audit_ok", "pulls")
    figures: dict[str, Any] = {key: found[key] for key in keys}
    if found["step_ends_s"]:
        figures["first_step_s"] = round(found["step_ends_s"][0] - started_s, 1)
    if status == 0 and found["audit_ok"]:
        figures["is_whole"] = True
    figures |= {"status": status, "overrides": words, "timeline": timeline}
    return gaps_of(found["step_ends_s"], args) | figures


def trl(
    args: argparse.Namespace,
    folder: Path,
    more: Sequence[str] = (),
    *,
    one_gpu: bool = False,
    case: str = "trl",
    own: Path | None = None,
) -> dict[str, Any]:
    """TRL's trainer on the first card, its server on the second or in its process.

    Args:
        folder: of model and rows.
        more: for `peer_trl`.
        own: folder of what it writes; without, the same.
    """
    flags, own, port = PEERS[case], own or folder, free_ports(1)[0]
    out = own / "trl.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.peer_trl", "--folder", str(folder)]
    command += [] if args.peer_budget is None else ["--budget", str(args.peer_budget)]
    command += ["--colocate"] if one_gpu else ["--url", f"http://127.0.0.1:{port}"]
    command += ["--out", str(out), "--dtype", str(flags["dtype"])]
    command += [] if flags["gradient_checkpointing"] else ["--no-checkpointing"]
    command += ["--samples", str(args.samples), "--group", str(GROUP), "--steps", str(args.steps)]
    command += ["--tokens", str(args.tokens), *more]
    length = max(2048, args.prompt + args.tokens + 8)
    arguments = ["--dtype", "bfloat16", "--max-model-len", str(length), "--max-num-seqs", "512"]
    arguments += ["--gpu-memory-utilization", "0.8", "--max-logprobs", "-1"]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    trains, *samples = args.cards.split(",")
    server: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not one_gpu:
        command_line = ["--model", str(folder / "model"), *arguments]
        server = server_of_trl(command_line, port, samples[0], own / "trl-server.log")
    with server, (own / "trl.log").open("w") as log:
        environment = os.environ | SERVED_BY_TRL | {"CUDA_VISIBLE_DEVICES": trains}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment | {"NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(args.limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    text = (own / "trl.log").read_text(encoding="utf-8", errors="replace")
    if not out.exists():  # its process may stay behind its last step
        ends = [float(at) for at in re.findall(r"step \d+ at ([\d.]+)", text)]
        end = {"is_whole": True} if len(ends) == args.steps else {"error": text[-2000:]}
        return gaps_of(ends, args) | end | {"ends_s": ends} | flags
    found = json.loads(out.read_text(encoding="utf-8"))
    figures = {name: found[name] for name in ("peak_gb", "ends_s")} | {"is_whole": True}
    return gaps_of(found["ends_s"], args) | figures | flags


@contextlib.contextmanager
def server_of_trl(arguments: list[str], port: int, card: str, log: Path) -> Iterator[None]:
    """vLLM with the weight transfer of its own that TRL uses, and nothing of ours."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--host", "127.0.0.1", *arguments]
    command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    environment = os.environ | SERVED_BY_TRL | {"CUDA_VISIBLE_DEVICES": card}
    process = subprocess.Popen(
        command,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
    try:
        until_s = time.monotonic() + START_S
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"TRL's server is not up: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def is_healthy(port: int) -> bool:
    """Whether TRL's server answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def gaps_of(ends_s: Sequence[float], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds between steps, and rates from their mean."""
    gaps = [round(after - before, 2) for before, after in pairwise(ends_s)]
    counted = gaps[START_UP:]
    if not counted:
        return {"gaps_s": gaps}
    mean_s = statistics.mean(counted)
    return {
        "gaps_s": gaps,
        "step_s": round(mean_s, 2),
        "num_gaps": len(counted),
        "samples_per_s": round(args.samples / mean_s, 2),
        "trained_tokens_per_s": round(args.samples * (args.prompt + args.tokens) / mean_s),
        "sampled_tokens_per_s": round(args.samples * args.tokens / mean_s),
    }


def table(cases: dict[str, dict[str, Any]]) -> str:
    """One row a case."""
    columns = ("step_s", "num_gaps", "samples_per_s", "trained_tokens_per_s", "first_step_s")
    rows = [f"{'':12}" + "".join(f"{name:>22}" for name in columns)]
    for case, found in cases.items():
        values = (str(found.get(name, "-")) for name in columns)
        rows.append(f"{case:12}" + "".join(f"{value:>22}" for value in values))
    return "\n".join(rows) + "\n"


def result_of(args: argparse.Namespace, folder: Path, case: str) -> dict[str, Any]:
    """Figures of a case; of one that failed, why."""
    started_s = time.monotonic()
    try:
        if case in PEERS:
            found = trl(args, folder, one_gpu=args.one_gpu, case=case)
        else:
            found = rlstreams(args, folder, case)
    except (RuntimeError, OSError, ValueError, KeyError, StreamsError) as err:
        found = {"error": f"{type(err).__name__}: {err}"[-3000:]}
    return found | {"wall_s": round(time.monotonic() - started_s, 1)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--shape", default="1.7b", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--samples", type=int, default=256, help="of a step")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--tokens", type=int, default=1024, help="of an answer")
    parser.add_argument("--longest", type=int, default=0, help="answer; lengths are lognormal")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--one-gpu", action="store_true", help="everything on GPU 0")
    parser.add_argument("--cpu", action="store_true", help="the script itself, without a GPU")
    parser.add_argument("--cards", default=CARDS, help="of the trainer and of the server")
    parser.add_argument("--peer-budget", type=int, help="tokens of TRL's micro-batch")
    parser.add_argument("--jars", default="", help="folder of the broker's jars")
    parser.add_argument("--folder", type=Path, default=Path("runs/end-to-end"))
    parser.add_argument("--limit-s", type=float, default=420.0, help="of one case")
    parser.add_argument("--within-s", type=float, default=1e6, help="all cases")
    parser.add_argument("--least-s", type=float, default=150.0, help="left, or none is begun")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("overrides", nargs="*", help="behind --: fields of our configuration")
    return parser.parse_args()


def main() -> int:
    """Every case, then the table; 1 if one is not whole."""
    args = parse()
    until_s = time.monotonic() + args.within_s
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.cards != CARDS:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.cards
    args.out.mkdir(parents=True, exist_ok=True)
    write_folder(folder / "model", args.shape, args.vocabulary)
    write_prompts(folder / "train.jsonl", rows=4096, tokens=args.prompt, vocabulary=args.vocabulary)
    asked = ("shape", "samples", "prompt", "tokens", "longest", "steps", "one_gpu", "overrides")
    asked += ("peer_budget",)
    about = {"hardware": hardware()} | {name: getattr(args, name) for name in asked}
    cases: dict[str, dict[str, Any]] = {}
    for case in args.cases.split(","):
        left_s = until_s - time.monotonic()
        if left_s < args.least_s:
            sys.stdout.write(f"{case}: not begun, {left_s:.0f} s are left\n")
            continue
        args.limit_s = min(args.limit_s, left_s)
        found = cases[case] = result_of(args, folder, case)
        name = case if found.pop("is_whole", False) else f"{case}-unfinished"
        text = json.dumps(about | {"case": case} | found, indent=1) + "\n"
        (args.out / f"end_to_end-{name}.json").write_text(text, encoding="utf-8")
        shown = {key: value for key, value in found.items() if key not in LONG}
        sys.stdout.write(f"{name}: {json.dumps(shown)}\n")
        if "timeline" in found:
            sys.stdout.write(lines_of(found["timeline"]))
        sys.stdout.flush()
    sys.stdout.write(table(cases))
    return int(any("error" in found or found.get("status") for found in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
