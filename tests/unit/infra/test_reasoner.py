"""The reasoner: its tasks are solved and judged; a tiny model is made, continued and evaluated."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.examples.reasoner import evaluate, pretrain, tasks
from rlstreams.check.doctor.check import Level
from rlstreams.check.doctor.devices import Gpu, memory_checks, placements
from rlstreams.check.doctor.model import read_model
from rlstreams.workers.config.load import load
from rlstreams.workers.model import documents, one_order
from tests.documents_on_cpu import one_by_one

EXAMPLE = Path(tasks.__file__).parent
EASY = tasks.cells((1, 2))
TINY = ["--shape", "tiny", "--device", "cpu", "--bin", "1536", "--workers", "0", "--steps", "4"]
SAMPLED = ["--device", "cpu", "--levels", "1,2", "--rows", "1", "--samples", "2"]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few texts for the tokenizer; torch's switches, which belong to the process, as before."""
    is_strict = torch.are_deterministic_algorithms_enabled()
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(pretrain, "TOKENIZER_TEXTS", 500)
    was_asked = one_order._is_asked
    yield
    one_order.ask(was_asked)
    torch.use_deterministic_algorithms(is_strict, warn_only=is_lenient)


@pytest.mark.parametrize("level", tasks.LEVELS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_solution_is_right_and_nothing_else_is(task: str, level: int) -> None:
    """With its working and without; not another's answer, none, or the answer without its mark."""
    rng, of = random.Random(level), {"task": task}
    for _ in range(20):
        one, other = (tasks.TASKS[task](rng, level) for _ in range(2))
        for is_worked in (True, False):
            assert tasks.reward(one.prompt, one.solution(is_worked=is_worked), one.answer, of) == 1
        for text in (one.answer, "", f"{tasks.MARK} ", f"{one.solution()}0"):
            assert tasks.reward(one.prompt, text, one.answer, of) == 0
        if one.answer != other.answer:
            assert tasks.reward(one.prompt, other.solution(), one.answer, of) == 0


def test_another_path_that_is_as_short_is_right() -> None:
    """A longer one is not, nor one along an edge that is not there, nor one to another place."""
    prompt, of = "Edges A-B B-D A-C C-D B-C. A shortest path from A to D?", {"task": "route"}
    paths = ("A-B-D", "A-C-D", "A-B-C-D", "A-D", "A-B-C", "C-D", "")
    texts = {path: f"{tasks.MARK} {path}" for path in paths}
    right = [path for path in paths if tasks.reward(prompt, texts[path], "A-B-D", of)]
    assert right == ["A-B-D", "A-C-D"]


def test_rows_follow_from_the_seed_and_held_out_ones_are_never_learnt() -> None:
    """Twice the same, none twice, none in both, none among the documents of pretraining."""
    train, again, held_out = (
        [problem.prompt for *_, problem in tasks.problems(0, 360, EASY, held_out=is_held_out)]
        for is_held_out in (False, False, True)
    )
    assert train == again
    assert len(set(train)) == 360
    assert not set(train) & set(held_out)
    texts = pretrain.Mixture([1, 1, 0, 0, 0], [1] * 5).texts("seed")
    assert not any(prompt in next(texts) for prompt in held_out for _ in range(3))
    with pytest.raises(ValueError, match="too many"):
        list(tasks.problems(0, 9 * 2000, tasks.cells((1,)), held_out=True))


def test_documents_of_a_row_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU packs has the loss that a mask gives."""
    monkeypatch.setattr(documents, "_fused", one_by_one)
    mixture = pretrain.Mixture([1, 1, 0, 0, 0], [1] * 5)
    tokenizer = pretrain.make_tokenizer(mixture, 0)
    bins = pretrain.Bins(tokenizer.backend_tokenizer, mixture, 0, 256)
    losses = []
    for is_packed in (False, True):
        model = pretrain.make_model("tiny", tokenizer, 0)
        training = pretrain.Training(model, "cpu", is_compiled=False)
        if is_packed:
            training._has_kernel = True
            pretrain.use_documents(training.model)
        losses.append(training.loss(bins[0]).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_model_is_made_continued_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of an uninterrupted run; its folder is one that evaluation loads."""
    monkeypatch.setattr(pretrain, "SHOW_EVERY", 1)
    monkeypatch.setattr(pretrain, "CHECKPOINT_EVERY", 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert pretrain.main([*TINY, "--out", str(whole)]) == 0

    monkeypatch.setattr(pretrain, "write", lambda *_: pytest.fail("not reached"))
    step, taken = pretrain.Training.step, []

    def dies(self: pretrain.Training, *args: object) -> torch.Tensor:
        taken.append(args)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(pretrain.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main([*TINY, "--out", str(cut)])
    monkeypatch.undo()
    monkeypatch.setattr(pretrain, "TOKENIZER_TEXTS", 500)
    with pytest.raises(SystemExit, match="is of --steps 4, not 5"):
        pretrain.main([*TINY[:-1], "5", "--out", str(cut)])
    assert pretrain.main([*TINY, "--out", str(cut)]) == 0

    one, other = (folder / "model.safetensors" for folder in (whole, cut))
    assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()
    assert json.loads((cut / "pretrain.json").read_text("utf-8"))["losses"][0][0] == 1
    out = tmp_path / "accuracy.json"
    limit = ["--max-new-tokens", "8", "--out", str(out)]
    assert evaluate.main(["--model", str(cut), *SAMPLED, *limit]) == 0
    accuracy = json.loads(out.read_text("utf-8"))["accuracy"]
    assert accuracy["all 2"]["problems"] == len(tasks.TASKS)
    assert {"walk 1", "walk 2"} <= accuracy.keys()


@pytest.mark.parametrize("overlays", [(), ("one-gpu.toml",)])
def test_the_runs_configuration_is_valid(overlays: tuple[str, ...]) -> None:
    """Its reward is that of the tasks."""
    config = load([EXAMPLE / name for name in ("run.toml", *overlays)])
    assert Path(config.reward.verifier.removesuffix(":reward")) == EXAMPLE / "tasks.py"


def test_one_gpu_has_room_for_all_that_is_put_there() -> None:
    """Three servers, each with its share, the trainer and the scorer, on a card of 80 GB."""
    config = load([EXAMPLE / "run.toml", EXAMPLE / "one-gpu.toml"])
    card = Gpu(index=0, uuid="GPU-0", name="H100", free_mb=84_000.0, total_mb=85_520.0)
    model = replace(read_model(str(EXAMPLE.parent / "demo/model")), num_parameters=151_000_000)
    places = list(placements(config, [card]))
    _, check = memory_checks(config, model, places, 100_000, is_up=False)
    assert (Level.OK, True) == (check.level, "3 x server 12.8" in check.found), check
    args = config.engine.args
    assert args["kv-cache-memory-bytes"] < args["gpu-memory-utilization"] * card.total_mb * 1e6
    assert config.rollout.workers * config.engine.max_running >= 3 * 256
