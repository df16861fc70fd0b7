"""The threads of the check of a model that is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlstreams.workers.engines import selfcheck


@pytest.mark.parametrize(("device", "expected"), [("cpu", 1), ("meta", 3)])
def test_a_role_on_a_gpu_checks_with_more_threads(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role on the CPU keeps its number, by which its results are the same each time."""
    seen = []
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(selfcheck, "load_model", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(selfcheck, "read_config", lambda _: None)
    monkeypatch.setattr(selfcheck, "vocab_size_of", lambda _: 1)
    monkeypatch.setattr(selfcheck, "TokenScorer", lambda *_: None)
    monkeypatch.setattr(selfcheck, "check_scoring", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        selfcheck.load_scorer(Path(), "float32", device)
        assert (seen, torch.get_num_threads()) == ([expected], 1)
    finally:
        torch.set_num_threads(before)
