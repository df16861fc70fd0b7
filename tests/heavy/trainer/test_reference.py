"""The KL term in a run: from the log alone, redone to the bit, and nothing where it is off."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.debug.rerun.rerun import RerunError, rerun
from rlstreams.schemas.events import DeadLetter, GroupsDropped, ScoredTrajectory
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import DEAD_LETTERS, STEPS
from rlstreams.workers.bootstrap.parts import make_scorers
from rlstreams.workers.compute import team
from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.engines.folder_channel import FolderChannel
from rlstreams.workers.logprob.scoring import Reference, score_window
from rlstreams.workers.logprob.versions import plan_anchors, versions_of
from rlstreams.workers.model.base import EngineError
from tests import families
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    run_steps,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus

COEF = 0.5


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The demo's model, as the log-prob role holds it."""
    folder = Path(make_config(Path("unused")).model.path)
    channel = FolderChannel(folder)
    scorer = scorer_of(folder)
    pulled = scorer.pull(channel.published, channel)
    return Reference(scorer=scorer, policy_version=0, weight_hash=pulled.weight_hash)


def test_a_reference_that_is_refused_leaves_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded before any is started."""
    config = make_config(tmp_path, trainer__loss__kl_coef=COEF)
    logprob = replace(config.logprob, ranks=2, reference=str(tmp_path))
    monkeypatch.setattr(team, "Team", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(EngineError, match="cannot read config"):
        make_scorers(replace(config, logprob=logprob))


def compared(reference: Reference, *samples: ScoredTrajectory) -> Sequence[ScoredTrajectory]:
    """Samples as the role scores them: under the reference, and here under version 0, the same."""
    window = [sample.trajectory for sample in samples]
    # Under no version that is held: only the reference scores.
    anchors = plan_anchors({v for t in window for v in versions_of(t)}, held=())
    found = score_window(window, anchors, {}, reference.scorer, reference)
    both = []
    for sample, scores in zip(samples, found, strict=True):
        logprobs = scores[0].reference_logprobs
        assert logprobs is not None
        prompt, policy = sample.trajectory.segments
        segments = (prompt, replace(policy, behavior_logprobs=logprobs))
        both.append(
            replace(
                sample,
                trajectory=replace(sample.trajectory, segments=segments),
                scores=(
                    replace(
                        sample.scores[0],
                        proximal_logprobs=logprobs,
                        reference_logprobs=logprobs,
                        reference_hash=scores[0].reference_hash,
                        reference_top_ids=scores[0].reference_top_ids,
                        reference_top_logprobs=scores[0].reference_top_logprobs,
                    ),
                ),
            )
        )
    return both


def group(reference: Reference, number: int, version: int = 0) -> Sequence[ScoredTrajectory]:
    return compared(reference, *(scored(number, sample, version) for sample in range(2)))


def test_it_is_nothing_at_version_0_and_grows(reference: Reference, tmp_path: Path) -> None:
    """The first step starts at the reference; behind it the policy has moved. A redo says so too,
    under the configuration of each step, whatever is set now."""
    log = make_log()
    config = make_config(tmp_path, trainer__loss__kl_coef=COEF, trainer__steps=4)
    first = make_trainer(log, config)
    for number in range(2):
        send(log, *group(reference, number))
        run_steps(log, first, number + 1)
    bury(first)
    distances = [step.metrics["kl_reference"] for step in steps(log)]
    assert abs(distances[0]) < 1e-9
    assert distances[1] > 1e-7
    off = make_config(tmp_path, trainer__steps=3)
    second = make_trainer(log, off, "two", takeover=True)  # an unequal redo would stop it
    train(log, second, 3)
    second.close()
    assert "kl_reference" not in steps(log)[-1].metrics


def test_what_has_no_reference_is_set_aside(reference: Reference, tmp_path: Path) -> None:
    """With the name of what it lacks, or with the weights that it should have been compared with;
    its group gives its place to another."""
    log, config = make_log(), make_config(tmp_path, trainer__loss__kl_coef=COEF, trainer__steps=1)
    trainer = make_trainer(log, config)
    other = replace(reference, weight_hash="f0" * 32)
    mixed = [group(other, 1)[0], group(reference, 1)[1]]
    send(log, scored(0, 0, 0), group(reference, 0)[1], *mixed, *group(reference, 2))
    run_steps(log, trainer, 1)
    trainer.close()
    letters = [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]
    assert [(letter.group_id, letter.reason) for letter in letters] == [
        ("0", "validation"),
        ("1", "validation"),
    ]
    assert "scores[0].reference_logprobs is missing" in letters[0].detail
    assert f"reference_hash must be {reference.weight_hash}" in letters[1].detail
    dropped = [e for e in read(log, STEPS.name) if isinstance(e, GroupsDropped)]
    assert sorted(g.group_id for e in dropped for g in e.groups) == ["0", "1"]


def test_the_first_score_says_which_weights_a_folder_has(
    reference: Reference, tmp_path: Path
) -> None:
    """Of two hosts whose folders of one name differ: the other one's samples are set aside."""
    config = make_config(
        tmp_path, trainer__loss__kl_coef=COEF, trainer__steps=1, logprob__reference="/models/other"
    )
    log = make_log()
    trainer = make_trainer(log, config)
    other = replace(reference, weight_hash="f0" * 32)
    late = [replace(sample, worker="logprob-1") for sample in group(reference, 1)]
    send(log, group(other, 0)[0], *late, group(other, 0)[1])
    run_steps(log, trainer, 1)
    trainer.close()
    letters = [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]
    assert [(letter.group_id, letter.reason) for letter in letters] == [("1", "validation")] * 2
    assert f"reference_hash must be {'f0' * 32}" in letters[0].detail
    assert f"got {reference.weight_hash} from logprob-1" in letters[0].detail


def test_a_run_has_one_reference(reference: Reference, tmp_path: Path) -> None:
    """Two would be two losses in one ledger."""
    log, config = make_log(), make_config(tmp_path, trainer__loss__kl_coef=COEF)
    first = make_trainer(log, config)
    tick_until(first, lambda: first._writer.state == "waiting")
    bury(first)
    other = replace(config, logprob=replace(config.logprob, reference="/models/other"))
    with pytest.raises(ConfigError, match=r"logprob\.reference was start and is /models/other"):
        make_trainer(log, other, "two", takeover=True)


TAUGHT: dict[str, object] = {
    "trainer__loss__kind": "distill",
    "trainer__loss__advantage": "one",
    "trainer__loss__correction": "none",
    "trainer__loss__distill_top_k": 4,
    "logprob__reference": "/models/teacher",
}


def test_distillation_is_redone_to_the_bit(tmp_path: Path) -> None:
    """From the log alone: the teacher's tokens are in it. A smaller number of them can be tried,
    and the sampled token alone; a larger one cannot."""
    log = make_log()
    config = make_config(tmp_path, trainer__steps=3, **TAUGHT)
    folder = Path(config.model.path)
    scorer, channel = scorer_of(folder, top_k=4), FolderChannel(folder)
    pulled = scorer.pull(channel.published, channel)
    teacher = Reference(scorer=scorer, policy_version=0, weight_hash=pulled.weight_hash)
    first = make_trainer(log, config)
    for number in range(2):
        send(log, *group(teacher, number))
        run_steps(log, first, number + 1)
    bury(first)
    done = steps(log)
    assert abs(done[0].metrics["kl_reference"]) < 1e-9  # it begins as its own teacher
    second = make_trainer(log, config, "two", takeover=True)
    tick_until(second, lambda: second._reporter.policy_version >= 2)
    assert second._training.weight_hash == done[-1].weight_hash
    bury(second)

    def tried(num: int) -> float:
        found = rerun(
            MemoryBus(log, "demo"),
            config,
            2,
            checkpoints=[],
            settings=[f"trainer.loss.distill_top_k={num}"],
        )
        assert found.is_equal
        return found.change.metrics["kl_reference"]

    assert tried(2) >= 0
    assert np.isfinite(tried(0))
    with pytest.raises(RerunError, match=r"has 4 tokens of the teacher.*distill_top_k is 5"):
        tried(5)


def test_a_teacher_with_other_padding_teaches(tmp_path: Path) -> None:
    """Sizes of one family have the same tokenizer, and rows beyond its tokens in other numbers."""
    sizes = {"vocab_size": 136, "max_position_embeddings": 128}
    other = families.make("Qwen3ForCausalLM", tmp_path / "teacher", **sizes)
    taught = TAUGHT | {"logprob__reference": str(other), "trainer__steps": 1}
    shutil.copy(Path(make_config(tmp_path).model.path) / "tokenizer.json", other)
    with pytest.raises(
        ConfigError, match=r"distill_top_k is 4, but logprob.reference has 136 rows"
    ):
        make_scorers(make_config(tmp_path, **taught))
    config = make_config(tmp_path, **(taught | {"trainer__loss__distill_top_k": 0}))
    _, teacher = make_scorers(config)
    assert teacher is not None
    assert teacher.scorer.vocab_size == 136
    log = make_log()
    trainer = make_trainer(log, config)
    send(log, *group(teacher, 0))
    run_steps(log, trainer, 1)
    trainer.close()
    (event,) = steps(log)
    assert "kl_reference" in event.metrics
    assert not [e for e in read(log, DEAD_LETTERS.name) if isinstance(e, DeadLetter)]


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """By the name of the field, with both sizes or the token: ids would mean other tokens."""
    other = families.make("Qwen3ForCausalLM", tmp_path)
    config = make_config(tmp_path, **(TAUGHT | {"logprob__reference": str(other)}))
    sizes = rf"vocabulary has {families.VOCABULARY} tokens; .*demo/model has \d+"
    with pytest.raises(ConfigError, match=rf"logprob.reference is .*{sizes}"):
        make_scorers(config)
    teacher = make_config(tmp_path).model.path
    shutil.copy(Path(teacher) / "tokenizer.json", other)
    rows = rf"vocabulary has {families.VOCABULARY} tokens; model.path's tokenizer has token 127, "
    with pytest.raises(ConfigError, match=rows):
        make_scorers(config)
    text = (other / "tokenizer.json").read_text("utf-8")
    (other / "tokenizer.json").write_text(text.replace('"33"', '"thirty"'), "utf-8")
    with pytest.raises(ConfigError, match=r"token 37 is 'thirty'; in model.path it is '33': name"):
        make_scorers(config)
    many = {"logprob__reference": teacher, "trainer__loss__distill_top_k": 1000}
    with pytest.raises(ConfigError, match=r"distill_top_k is 1000, but the vocabulary has 1\d\d"):
        make_scorers(make_config(tmp_path, **(TAUGHT | many)))
