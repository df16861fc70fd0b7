"""Publish, durable, arrays: our data path as a ratio to the bare client on the same broker.

    python tests/bench/data_path.py [--quick] [--save]

One process sends transactions with positions and done set, another reads committed messages to
numpy arrays; a broker of one node lies between. Rounds of the rows take turns, a ratio is that of
one round, and medians with their range are told. A loaded machine disturbs: look at the range.
Goals: ours / bare at least 0.6 (S), 0.9 (M) and 0.9 (L). Payloads: S 1,024 tokens with log-probs,
M 16,384, L 8,192 with routed experts (48 layers, top 8). Latency: one message a transaction.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import confluent_kafka
import numpy as np
from confluent_kafka.admin import AdminClient, NewTopic

from streams.broker import EmbeddedBroker
from tests.bench.data_path_ends import (
    INPUT,
    NUM_PARTITIONS,
    PAYLOADS,
    RUN,
    Arrays,
    BareReceiver,
    BareSender,
    IdempotentSender,
    OurReceiver,
    OurSender,
    Receiver,
    Sender,
    pool,
)

GOALS = {"S": 0.6, "M": 0.9, "L": 0.9}
SENDERS: Mapping[str, Callable[[str], Sender]] = {
    "ours": OurSender,
    "bare": BareSender,
    "idempotent": IdempotentSender,
}
RECEIVERS: Mapping[str, Callable[[str], Receiver]] = {
    "ours": OurReceiver,
    "bare": BareReceiver,
    "idempotent": BareReceiver,
}
NUM_INPUTS = 8_192
CHECK_EVERY = 16
SILENCE_S = 30.0  # of one end, until the bench gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long what is measured."""

    rounds: int
    send_s: float
    light_share: float  # of the messages of a full latency round


FULL = Plan(rounds=5, send_s=1.5, light_share=1.0)
QUICK = Plan(rounds=3, send_s=0.7, light_share=0.4)


def cpu_s() -> float:
    """User and system seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class SenderProcess:
    """What the parent asks the sending process for."""

    def __init__(self, bootstrap: str, _parent: Connection) -> None:
        self._senders = {name: make(bootstrap) for name, make in SENDERS.items()}

    def warm(self, row: str, payload: str, topic: str) -> None:
        """One message, so that the client knows the topic's partitions."""
        self._senders[row].send(topic, pool(payload)[:1])
        self._senders[row].finish()

    def send(self, row: str, payload: str, topic: str, send_s: float) -> dict[str, Any]:
        """Transactions, one behind the other, for `send_s`."""
        sender, samples = self._senders[row], cycle(pool(payload))
        num_transactions, used_s, start_s = 0, cpu_s(), time.monotonic()
        while time.monotonic() < start_s + send_s:
            sender.send(topic, list(islice(samples, PAYLOADS[payload].per_transaction)))
            num_transactions += 1
        sender.finish()
        return {
            "num_sent": num_transactions * PAYLOADS[payload].per_transaction,
            "start_s": start_s,
            "transaction_s": (time.monotonic() - start_s) / num_transactions,
            "cpu_s": cpu_s() - used_s,
        }

    def send_light(self, row: str, payload: str, topic: str, count: int) -> list[float]:
        """One message a transaction at a fixed rate; when each was begun, before it was encoded."""
        period_s = 1 / PAYLOADS[payload].light_hz
        begun_s = []
        next_s = time.monotonic()
        for sample in islice(cycle(pool(payload)), count):
            time.sleep(max(0.0, next_s - time.monotonic()))
            begun_s.append(time.monotonic())
            self._senders[row].send(topic, [sample])
            next_s += period_s
        return begun_s


class ReceiverProcess:
    """What the parent asks the reading process for."""

    def __init__(self, bootstrap: str, parent: Connection) -> None:
        self._receivers = {name: make(bootstrap) for name, make in RECEIVERS.items()}
        self._parent = parent

    def seek(self, row: str, topic: str) -> None:
        """Begin at the beginning."""
        self._receivers[row].seek(topic)

    def warm(self, row: str, payload: str) -> None:
        """Wait for the first message."""
        deadline = time.monotonic() + SILENCE_S
        while not self._receivers[row].take(PAYLOADS[payload].shape):
            assert time.monotonic() < deadline, f"{row} {payload}: the first message never came"

    def receive(self, row: str, payload: str) -> dict[str, Any]:
        """Until as many have come as the parent says; it says so when the sender is done."""
        samples = {_name(s.arrays()): s.arrays() for s in pool(payload)}
        num_read, used_s = 0, cpu_s()
        for arrays in self._until_told(row, payload):
            assert all(a.flat[0] is not None and a.flat[-1] is not None for a in arrays)  # touched
            if num_read % CHECK_EVERY == 0:
                for was, is_ in zip(samples[_name(arrays)], arrays, strict=True):
                    assert np.array_equal(was, is_), f"message {num_read} of {row} is not as sent"
            num_read += 1
        return {"num_read": num_read, "end_s": time.monotonic(), "cpu_s": cpu_s() - used_s}

    def receive_light(self, row: str, payload: str) -> list[tuple[int, float]]:
        """Which sample of the pool came when."""
        numbers = {_name(s.arrays()): number for number, s in enumerate(pool(payload))}
        came = self._until_told(row, payload)
        return [(numbers[_name(arrays)], time.monotonic()) for arrays in came]

    def _until_told(self, row: str, payload: str) -> Iterator[Arrays]:
        receiver, shape = self._receivers[row], PAYLOADS[payload].shape
        total, num_read = float("inf"), 0
        deadline = time.monotonic() + SILENCE_S
        while num_read < total:
            for arrays in receiver.take(shape):
                yield arrays
                num_read += 1
                deadline = time.monotonic() + SILENCE_S
            if total == float("inf") and self._parent.poll():
                total = self._parent.recv()
            assert time.monotonic() < deadline, f"{row} {payload}: {num_read} of {total} came"
        assert num_read == total, f"{row} {payload}: {num_read} came, {total} were sent"


def _name(arrays: Arrays) -> bytes:
    """The first tokens tell which sample of the pool it is."""
    return arrays[0][:4].tobytes()


class Child:
    """A process that answers calls of the methods of `end`, one at a time."""

    def __init__(self, end: type, bootstrap: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, bootstrap, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._what = end.__name__

    def begin(self, method: str, **arguments: object) -> None:
        self._pipe.send((method, arguments))

    def tell(self, what: object) -> None:
        self._pipe.send(what)

    def result(self) -> Any:
        if not self._pipe.poll(2 * SILENCE_S):
            raise TimeoutError(f"{self._what}: no answer within {2 * SILENCE_S:.0f} s")
        return self._pipe.recv()

    def call(self, method: str, **arguments: object) -> Any:
        self.begin(method, **arguments)
        return self.result()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(end: type, bootstrap: str, parent: Connection) -> None:
    served = end(bootstrap, parent)
    while True:
        method, arguments = parent.recv()
        parent.send(getattr(served, method)(**arguments))


class Bench:
    """Both processes, the broker, and topics that live for one round."""

    def __init__(self, bootstrap: str, broker_pid: int) -> None:
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": "2"})
        self._broker_pid = broker_pid
        self._num_topics = 0
        self._create(INPUT, 4)
        _fill_inputs(bootstrap)
        self.sender = Child(SenderProcess, bootstrap)
        self.receiver = Child(ReceiverProcess, bootstrap)

    def _create(self, topic: str, num_partitions: int) -> None:
        # What a round wrote is removed at once: the disk and its cache would fill up.
        new = NewTopic(f"{RUN}.{topic}", num_partitions, 1, config={"file.delete.delay.ms": "100"})
        for future in self._admin.create_topics([new]).values():
            future.result(SILENCE_S)

    @contextmanager
    def _topic(self, row: str, payload: str) -> Iterator[str]:
        self._num_topics += 1
        topic = f"trajectories-{self._num_topics}"
        self._create(topic, NUM_PARTITIONS)
        self.receiver.call("seek", row=row, topic=topic)
        self.sender.call("warm", row=row, payload=payload, topic=topic)
        self.receiver.call("warm", row=row, payload=payload)
        yield topic
        for future in self._admin.delete_topics([f"{RUN}.{topic}"]).values():
            future.result(SILENCE_S)

    def throughput(self, row: str, payload: str, send_s: float) -> dict[str, float]:
        """Messages a second from the first send to the last decode, CPU seconds per GB."""
        with self._topic(row, payload) as topic:
            before_s = _cpu_s_of(self._broker_pid)
            self.receiver.begin("receive", row=row, payload=payload)
            sent = self.sender.call("send", row=row, payload=payload, topic=topic, send_s=send_s)
            self.receiver.tell(sent["num_sent"])
            read = self.receiver.result()
            broker_s = _cpu_s_of(self._broker_pid) - before_s
        wall_s = read["end_s"] - sent["start_s"]
        num_gb = sent["num_sent"] * pool(payload)[0].num_bytes / 1e9
        return {
            "per_s": sent["num_sent"] / wall_s,
            "mb_per_s": num_gb * 1e3 / wall_s,
            "transaction_ms": 1e3 * sent["transaction_s"],
            "cpu_s_per_gb": (sent["cpu_s"] + read["cpu_s"] + broker_s) / num_gb,
            "sender_cpu_s_per_gb": sent["cpu_s"] / num_gb,
            "receiver_cpu_s_per_gb": read["cpu_s"] / num_gb,
        }

    def latency_ms(self, row: str, payload: str, share: float) -> list[float]:
        """From before the encoding to the arrays, under a light load."""
        count = round(PAYLOADS[payload].light_messages * share)
        with self._topic(row, payload) as topic:
            self.receiver.begin("receive_light", row=row, payload=payload)
            what = {"row": row, "payload": payload, "topic": topic, "count": count}
            begun_s = self.sender.call("send_light", **what)
            self.receiver.tell(count)
            arrived = self.receiver.result()
        # A sample has one key, so its copies come in the order in which they were sent.
        sent: dict[int, deque[float]] = defaultdict(deque)
        for number, at_s in zip(cycle(range(PAYLOADS[payload].pool)), begun_s, strict=False):
            sent[number].append(at_s)
        return [(at_s - sent[number].popleft()) * 1e3 for number, at_s in arrived]

    def close(self) -> None:
        """End both processes."""
        self.sender.stop()
        self.receiver.stop()


def _fill_inputs(bootstrap: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for number in range(NUM_INPUTS):
        producer.produce(f"{RUN}.{INPUT}", b"input", partition=number % 4)
    assert producer.flush(SILENCE_S) == 0


def _cpu_s_of(pid: int) -> float:
    """User and system seconds of another process; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(bench: Bench, name: str, rows: Sequence[str], plan: Plan) -> dict[str, Any]:
    """One payload: rounds in turns, then latency."""
    for row in rows:
        bench.throughput(row, name, plan.send_s / 2)
    found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    for number in range(plan.rounds):
        for row in rows if number % 2 == 0 else rows[::-1]:
            found[row].append(bench.throughput(row, name, plan.send_s))
    bare = [round_["per_s"] for round_ in found["bare"]]
    result: dict[str, Any] = {"bytes": pool(name)[0].num_bytes, "rows": {}}
    for row in rows:
        numbers = {key: [round_[key] for round_ in found[row]] for key in found[row][0]}
        result["rows"][row] = {key: round(statistics.median(v), 2) for key, v in numbers.items()}
        ratios = [mine / theirs for mine, theirs in zip(numbers["per_s"], bare, strict=True)]
        result["rows"][row]["ratio"] = round(statistics.median(ratios), 3)
        result["rows"][row]["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    for row in ("bare", "ours"):
        latency = bench.latency_ms(row, name, plan.light_share)
        result["rows"][row]["p50_ms"] = round(float(np.percentile(latency, 50)), 2)
        result["rows"][row]["p99_ms"] = round(float(np.percentile(latency, 99)), 2)
    return result


def hardware() -> dict[str, object]:
    """What it ran on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model n"))
    except (FileNotFoundError, StopIteration):
        cpu = platform.processor()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "confluent_kafka": confluent_kafka.version(),
        "librdkafka": confluent_kafka.libversion()[0],
        "load_average": round(os.getloadavg()[0], 1),
    }


def table(results: Mapping[str, Any]) -> str:
    """The results as lines of text."""
    head = f"   {'row':11} {'per s':>8} {'MB/s':>6} {'x bare (min-max)':>20} {'goal':>5}"
    lines = [head + f" {'p50 ms':>7} {'p99 ms':>7} {'CPU s/GB':>9} {'txn ms':>6}"]
    for name, result in results.items():
        for row, r in result["rows"].items():
            low, high = r["ratio_range"]
            goal = f"{GOALS[name]:.1f}" if row == "ours" else ""
            ratio = f"{r['ratio']:.2f} ({low:.2f}-{high:.2f})"
            lines.append(
                f"{name:2} {row:11} {r['per_s']:8,.0f} {r['mb_per_s']:6,.0f} {ratio:>20} {goal:>5}"
                f" {r.get('p50_ms', ''):>7} {r.get('p99_ms', ''):>7} {r['cpu_s_per_gb']:9.2f}"
                f" {r['transaction_ms']:6.0f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run it, print the table; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, 40 s")
    parser.add_argument("--save", action="store_true", help="write results/data_path-<date>.json")
    parser.add_argument("--payloads", default="SML", help="which of S, M and L")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    rows = ("bare", "ours") if options.quick else ("bare", "ours", "idempotent")
    start_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the broker
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        state = broker.start()
        try:
            with closing(Bench(state.bootstrap, state.pid)) as bench:
                results = {name: measure(bench, name, rows, plan) for name in options.payloads}
        finally:
            broker.stop()
    sys.stdout.write(table(results) + f"\n{time.monotonic() - start_s:.0f} s\n")
    if options.save:
        path = Path(__file__).parent / f"results/data_path-{time.strftime('%Y-%m-%d')}.json"
        path.parent.mkdir(exist_ok=True)
        saved = {"hardware": hardware(), "rounds": plan.rounds, "results": results}
        path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    missed = [n for n, r in results.items() if r["rows"]["ours"]["ratio"] < GOALS[n]]
    sys.exit(f"below the goal: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
