"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
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
