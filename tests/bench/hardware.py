"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path

import confluent_kafka


def hardware() -> dict[str, object]:
    """Processor, memory, system, versions and load."""
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


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Cpu:
    """CPU by part, from now on: threads of this process by their names, and the broker.

    Args:
        broker: its process id; 0: it is left out.
    """

    PARTS = (
        ("engine-loop", "gateway"),
        ("MainThread", "role"),
        ("decode", "engine"),
        ("client", "http client"),
    )

    def __init__(self, broker: int) -> None:
        self._broker, self._clocks = broker, dict[str, int]()
        self._begun = self._now()

    def _now(self) -> dict[str, float]:
        for thread in threading.enumerate():
            for begin, part in self.PARTS:
                if thread.ident is not None and thread.name.startswith(begin):
                    self._clocks[part] = time.pthread_getcpuclockid(thread.ident)
        found = {part: time.clock_gettime(clock) for part, clock in self._clocks.items()}
        found["other threads"] = time.process_time() - sum(found.values())
        return found | ({"broker": process_cpu_s(self._broker)} if self._broker else {})

    def ms_per_call(self, calls: int) -> dict[str, float]:
        """Milliseconds of a call, by part; ask for it while the threads live."""
        now = self._now()
        return {k: round(1000 * (s - self._begun.get(k, 0.0)) / calls, 2) for k, s in now.items()}
