"""The processes of the data path's bench: one sends, one reads, a parent that gives the orders."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
from confluent_kafka.admin import AdminClient, NewTopic

from tests.bench.data_path_ends import (
    INPUT,
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

SENDERS: Mapping[str, Callable[[str], Sender]] = {
    "ours": OurSender,
    "bare": BareSender,
    "no txn": IdempotentSender,
}
RECEIVERS: Mapping[str, Callable[[str], Receiver]] = {
    "ours": OurReceiver,
    "bare": BareReceiver,
    "no txn": OurReceiver,
}
NUM_INPUTS = 8_192
# Of each row, before the first round: what transactions a minute of a run has. A broker that was
# started a moment ago takes 25 ms of processor time for one over 16 partitions, then 5.
NUM_EXERCISES = 400
EXERCISE_MESSAGES = 16  # of each
INTERVAL_S = 0.1  # of commits, as roles have it
CHECK_EVERY = 16
SILENCE_S = 30.0  # of one end, until the bench gives up


def cpu_s() -> float:
    """User and system seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Pace:
    """How many messages a transaction takes, so that one begins every 100 ms.

    Found by trying, row by row: a slower row has smaller ones, as it has under a commit interval.
    """

    def __init__(self, count: int) -> None:
        self._count = float(count)

    @property
    def count(self) -> int:
        return max(1, round(self._count))

    def took(self, seconds: float) -> None:
        self._count *= min(max(INTERVAL_S / seconds, 0.8), 1.25)


class SenderProcess:
    """What the parent asks the sending process for."""

    def __init__(self, bootstrap: str, _parent: Connection) -> None:
        self._senders = {name: make(bootstrap) for name, make in SENDERS.items()}
        self._paces = {
            (row, payload.name): Pace(payload.per_transaction)
            for row in SENDERS
            for payload in PAYLOADS.values()
        }

    def warm(self, row: str, payload: str, topic: str) -> None:
        """One message, so that the client knows the topic's partitions."""
        self._senders[row].send(topic, pool(payload)[:1])
        self._senders[row].finish()

    def exercise(self, row: str, payload: str, topic: str, count: int) -> None:
        """`count` small transactions; no less often acknowledged than a full one is."""
        for _ in range(count):
            self._senders[row].send(topic, pool(payload)[:EXERCISE_MESSAGES])
            self._senders[row].finish()

    def send(self, row: str, payload: str, topic: str, send_s: float) -> dict[str, Any]:
        """Transactions, one behind the other, for `send_s`."""
        sender, samples = self._senders[row], cycle(pool(payload))
        pace = self._paces[row, payload]
        num_sent, num_transactions, used_s = 0, 0, cpu_s()
        now_s = start_s = time.monotonic()
        while now_s < start_s + send_s:
            batch = list(islice(samples, pace.count))
            sender.send(topic, batch)
            began_s, now_s = now_s, time.monotonic()
            pace.took(now_s - began_s)
            num_transactions += 1
            num_sent += len(batch)
        sender.finish()
        return {
            "num_sent": num_sent,
            "start_s": start_s,
            "transaction_s": (time.monotonic() - start_s) / num_transactions,
            "cpu_s": cpu_s() - used_s,
        }


class ReceiverProcess:
    """What the parent asks the reading process for."""

    def __init__(self, bootstrap: str, parent: Connection) -> None:
        self._receivers = {name: make(bootstrap) for name, make in RECEIVERS.items()}
        self._parent = parent

    def seek(self, row: str, topic: str, num_partitions: int) -> None:
        """Begin at the beginning."""
        self._receivers[row].seek(topic, num_partitions)

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

    def __init__(self, bootstrap: str, broker_pid: int, num_partitions: int) -> None:
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": "2"})
        self._broker_pid = broker_pid
        self._num_partitions = num_partitions
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
        self._create(topic, self._num_partitions)
        self.receiver.call("seek", row=row, topic=topic, num_partitions=self._num_partitions)
        self.sender.call("warm", row=row, payload=payload, topic=topic)
        self.receiver.call("warm", row=row, payload=payload)
        yield topic
        for future in self._admin.delete_topics([f"{RUN}.{topic}"]).values():
            future.result(SILENCE_S)

    def exercise(self, payload: str) -> None:
        """What a minute of a run does to the broker: its compiler has seen transactions."""
        for row in SENDERS:
            self._num_topics += 1
            topic = f"trajectories-{self._num_topics}"
            self._create(topic, self._num_partitions)
            what = {"row": row, "payload": payload, "topic": topic, "count": NUM_EXERCISES}
            self.sender.call("exercise", **what)
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
