"""Real worker processes, started in both ways: their imports alone take seconds."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from workers.config.load import resolved_json
from workers.config.run import RunConfig
from workers.supervisor.child import ChildSpec, ForkSpawner, PlainSpawner, log_tail


def test_both_ways_to_start_a_worker_run_the_same_command(tmp_path: Path) -> None:
    """A configuration that cannot be used is told in the log, and ends with status 78."""
    config = tmp_path / "config.json"
    config.write_text(resolved_json(RunConfig()).replace('"seed"', '"sead"'))
    context = multiprocessing.get_context("forkserver")
    for number, spawner in enumerate(
        (PlainSpawner(), ForkSpawner(context, "workers.loop.runtime"))
    ):
        spec = ChildSpec(
            role="prompts", ordinal=number, config=config, log=tmp_path / f"{number}.log",
            instance="i",
        )  # fmt: skip
        child = spawner.spawn(spec)
        assert child.wait(20)
        assert child.poll() == 78
        assert "sead" in log_tail(spec.log)[-1]
