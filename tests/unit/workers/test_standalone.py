"""A worker that no supervisor started keeps to the trainer's configuration, and leaves with it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlstreams.schemas import decode
from rlstreams.schemas.events import TrainerStarted, WorkerReport
from rlstreams.streams.addresses import is_loopback
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import code_hashes
from rlstreams.workers.loop import agreement, compared, host, standalone
from rlstreams.workers.loop.agreement import (
    check_alone,
    disagreement,
    files_of,
    other_files_text,
    other_release,
    out_of_reach,
    user_code_hashes,
    weights_digest,
)
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.loop.standalone import StandaloneRole
from rlstreams.workers.model.model import Numerics
from rlstreams.workers.trainer import facts
from tests import factories
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.roles.stand import EXAMPLE
from tests.unit.workers.test_stage import HeldStage, issue, make_log, ticks

OURS = RunConfig()
COOLER = replace(OURS, rollout=replace(OURS.rollout, temperature=0.7))


class Scene:
    """A rollout worker of this configuration beside a trainer's `steps`."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.stage = HeldStage()
        self._pen = MemoryBus(log, "run").producer("trainer.0")

    def claims(self, config: RunConfig, epoch: int = 1) -> int:
        """A trainer starts with it; where its claim lies."""
        event = factories.trainer_started(config=resolved_json(config), epoch=epoch, hashes={})
        (position,) = self._pen.commit([outgoing(STEPS, event)])
        return position.offset

    def beats(self, claim_offset: int, *, state: str = "training", next_step: int = 4) -> None:
        """A trainer's heartbeat."""
        event = factories.heartbeat(
            claim_offset=claim_offset, state=state, next_step=next_step, epoch=1
        )
        self._pen.commit([outgoing(STEPS, event)])

    def worker(self, config: RunConfig = OURS) -> StandaloneRole:
        """Started now."""
        bus = MemoryBus(self.log, "run")
        context = Context(config=config, bus=bus, role="rollout", ordinal=0, instance="i1")
        loop = StageLoop(
            context, bus, self.stage, "prompts", reporter=Reporter(context), interval_s=0.0
        )
        return StandaloneRole(loop, context)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Without pauses between two looks."""
    monkeypatch.setattr(compared, "LOOK_S", 0.0)
    monkeypatch.setenv("RLSTREAMS_HOST", "sampler")
    return Scene(make_log())


def test_a_claim_with_another_configuration_ends_a_worker_by_name(scene: Scene) -> None:
    worker = scene.worker(COOLER)
    worker.tick()
    scene.claims(OURS)

    with pytest.raises(ConfigError) as refused:
        worker.tick()

    expected = (
        "rollout-0 on host sampler and the trainer on host learner (epoch 1) do not run the same: "
        "rollout.temperature is 0.7 here and 1.0 there; start every role of a run with one "
        "configuration"
    )
    assert expected == str(refused.value)


def test_a_worker_that_joins_learns_of_the_claim_by_a_heartbeat(scene: Scene) -> None:
    """The claim lies before it came; the trainer's sign of life says where."""
    offset = scene.claims(OURS)
    worker = scene.worker(COOLER)
    ticks(worker)  # the trainer may be dead, and the run about to be resumed
    scene.beats(offset)

    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        worker.tick()


def test_a_resumed_run_may_have_another_configuration(scene: Scene) -> None:
    """What a dead trainer claimed binds nobody; what its successor claims does."""
    scene.beats(scene.claims(OURS))
    worker = scene.worker(COOLER)
    ticks(worker)
    scene.claims(COOLER, epoch=2)
    ticks(worker)


def test_a_worker_leaves_once_the_trainer_is_done_and_nothing_is_to_do(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has begun it finishes first."""
    monkeypatch.setattr(standalone, "LINGER_S", 0.0)
    worker = scene.worker()
    issue(scene.log, "1/0")
    ticks(worker)
    scene.beats(-1, state="done", next_step=OURS.trainer.steps + 1)
    ticks(worker, 5)
    assert not worker.done

    scene.stage.released = ["1/0"]
    ticks(worker, 5)
    assert worker.done


def test_a_worker_of_a_run_that_goes_on_beyond_the_last_target_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be resumed before its trainer is."""
    monkeypatch.setattr(standalone, "LINGER_S", 0.0)
    scene.beats(-1, state="done", next_step=OURS.trainer.steps)
    worker = scene.worker()
    ticks(worker, 5)
    assert not worker.done


def test_what_is_a_host_s_own_may_differ() -> None:
    """Folders, devices and sizes of batches say nothing of what is computed."""
    reward = replace(OURS.reward, verifier="/home/a/reward.py:score", processes=1)
    theirs = replace(OURS.reward, verifier="/srv/reward.py:score", processes=8)
    here = replace(OURS, reward=reward, rollout=replace(OURS.rollout, slots=8, device="cuda:1"))
    claim = factories.trainer_started(config=resolved_json(replace(OURS, reward=theirs)), hashes={})
    assert "" == disagreement(here, "rollout", claim)


@pytest.mark.parametrize(
    ("file", "changes", "is_other"),
    [
        ("config.json", {"rope_theta": 1.5}, True),
        ("config.json", {"transformers_version": "0.1", "torch_dtype": "float16"}, False),
        ("generation_config.json", {"eos_token_id": [2, 7]}, True),
        ("generation_config.json", {"temperature": 0.1}, False),
    ],
)
def test_another_model_under_the_same_tokenizer_is_refused_with_both_hashes(
    tmp_path: Path, file: str, changes: dict[str, object], *, is_other: bool
) -> None:
    """Its weights are pulled and would fit; what it computes of them, or where it ends, would not
    be the run's. What a library writes of itself says nothing."""
    shutil.copytree(EXAMPLE.parent / "demo/model", tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=3))
    theirs = load([EXAMPLE])
    ours = replace(theirs, model=replace(theirs.model, path=str(tmp_path / "model")))
    hashes = facts.hashes_of(theirs)
    claim = factories.trainer_started(config=resolved_json(theirs), hashes=hashes)
    told = disagreement(ours, "rollout", claim)
    assert is_other == bool(told)
    if is_other:
        both = (agreement.shape_hash(ours.model.path)[:12], hashes["shape"][:12])
        assert "have SHA-256 {} here and {} there".format(*both) in told


def test_a_reference_of_other_weights_is_refused_with_both_digests(tmp_path: Path) -> None:
    """Of two folders of one name; not where it is on one host alone, nor by roles without it."""
    made: dict[str, RunConfig] = {}
    for name in ("here", "there", "same", "none"):
        folder = tmp_path / name / "teacher"
        made[name] = replace(
            OURS,
            trainer=replace(OURS.trainer, loss=LossSection(kl_coef=0.1)),
            logprob=replace(OURS.logprob, reference=str(folder)),
        )
        if name != "none":
            shutil.copytree(EXAMPLE.parent / "demo/model", folder)
    edited(tmp_path / "there" / "teacher")

    def differ(here: str, there: str, role: str = "logprob") -> str:
        hashes = facts.hashes_of(made[there])
        claim = factories.trainer_started(config=resolved_json(made[there]), hashes=hashes)
        return disagreement(made[here], role, claim)

    found = differ("here", "there")
    assert re.fullmatch(
        r"the weights of logprob\.reference '.*/here/teacher' have SHA-256 [0-9a-f]{12} here and "
        r"[0-9a-f]{12} there \(of samples\)",
        found,
    )
    alike = (("here", "same"), ("none", "there"), ("here", "none"), ("here", "there", "rollout"))
    assert [""] * 4 == [differ(*hosts) for hosts in alike]


def edited(folder: Path) -> None:
    """One weight in the middle of a tensor is another one; the file's size is the same."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8 : 8 + size])
    begin, end = tensors["model.embed_tokens.weight"]["data_offsets"]
    content[8 + size + (begin + end) // 2] ^= 1
    file.write_bytes(content)


def test_a_digest_tells_weights_and_not_files(tmp_path: Path) -> None:
    """A tied head that is written or left out is the same model, and so is one in two files; what
    is no model has none."""
    one, two, bad = (tmp_path / name for name in ("one", "two", "bad"))
    for folder in (one, two, bad):
        folder.mkdir()
    rows = {f"layer.{n}": np.full((64, 64), n, np.float32) for n in range(3)}
    save_file(rows, one / "model.safetensors")
    save_file(rows | {"lm_head.weight": rows["layer.0"]}, two / "model-1.safetensors")
    assert weights_digest(str(one), "float32") == weights_digest(str(two), "float32") != ""
    save_file({"layer.2": rows["layer.2"]}, two / "model-2.safetensors")
    save_file({"layer.0": rows["layer.0"], "layer.1": rows["layer.1"]}, two / "model-1.safetensors")
    assert weights_digest(str(one), "float32") == weights_digest(str(two), "float32")
    save_file({"layer.2": rows["layer.1"]}, two / "model-2.safetensors")
    assert weights_digest(str(one), "float32") != weights_digest(str(two), "float32")
    (bad / "model.safetensors").write_bytes(b"none")
    assert (
        ""
        == weights_digest(str(bad), "float32")
        == weights_digest(str(tmp_path), "float32")
        == weights_digest("", "float32")
    )


def test_user_code_of_another_content_is_refused_by_file_and_both_hashes(tmp_path: Path) -> None:
    """Also a neighbour that it imports, wherever the folders lie; not what only one host has."""
    text = "import rules\ndef grade(prompt, completion, answer, metadata): return rules.ONE\n"
    made: dict[str, RunConfig] = {}
    for name, rules in (("here", "ONE = 1"), ("there", "ONE = 2"), ("same", "ONE = 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rules.py").write_text(rules)
        (tmp_path / name / "unused.py").write_text(name)
        (tmp_path / name / "reward.py").write_text(text)
        verifier = f"{tmp_path / name / 'reward.py'}:grade"
        made[name] = replace(OURS, reward=replace(OURS.reward, verifier=verifier))

    def claim(config: RunConfig) -> TrainerStarted:
        hashes = user_code_hashes(config)
        return factories.trainer_started(config=resolved_json(config), hashes=hashes)

    def differ(here: str, there: str, role: str = "rollout") -> str:
        assert "" == disagreement(made[here], role, claim(made[there]))
        return other_files_text(files_of(made[here], role), claim(made[there]).hashes)

    found = differ("here", "there")
    assert re.fullmatch(
        r"reward\.verifier: rules\.py has SHA-256 [0-9a-f]{12} here and [0-9a-f]{12} there", found
    )
    assert "" == differ("here", "same")
    in_claim = facts.hashes_of(made["there"])  # what the trainer puts into its own
    assert user_code_hashes(made["there"]).items() <= in_claim.items()
    assert "" == differ("here", "there", "logprob")
    (tmp_path / "there" / "reward.py").unlink()
    assert "" == differ("here", "there")


def test_code_of_a_module_is_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of its package that it imports, relative imports included."""
    package = tmp_path / "judging"
    package.mkdir()
    for name, text in {
        "__init__": "raise AssertionError",
        "grade": "from . import rules\nfrom judging.more import x\nimport json",
        "rules": "",
        "more": "from .rules import y",
        "unused": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = {f"judging/{name}.py" for name in ("__init__", "grade", "rules", "more")}
    assert names == set(code_hashes("judging.grade:f"))
    assert {} == code_hashes("judging.none:f") == code_hashes("numeric")
    assert "json/__init__.py" in code_hashes("json:loads")
    assert all(path.startswith("json/") for path in code_hashes("json:loads"))


def test_another_commit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one release; where both are known."""
    claim = factories.trainer_started(
        versions={"rlstreams": version("rlstreams"), "commit": "abc"}, hashes={}
    )
    monkeypatch.setattr(agreement, "commit", lambda: "abd")
    assert "(commit abd) here and 0.1.0 (commit abc) at the trainer" in other_release(claim)
    monkeypatch.setattr(agreement, "commit", lambda: "")
    assert "" == other_release(claim)
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|", host.commit())


def test_a_worker_reports_its_release() -> None:
    """Each second, so that a fleet of several releases is seen while it works."""
    bus = MemoryBus(make_log(), "run")
    context = Context(config=OURS, bus=bus, role="rollout", ordinal=0, instance="i1")
    (report,) = Reporter(context).due()
    event = decode(b"".join(report.value))
    assert isinstance(event, WorkerReport)
    assert (
        host.release()
        == event.release
        == host.release_of(facts.versions(Numerics(threads=1, cpu_capability="")))
    )


def test_scorer_and_trainer_agree_on_what_both_compute_with() -> None:
    """Whether routes are replayed is a field of the trainer that the log-prob worker reads."""
    theirs = replace(OURS, trainer=replace(OURS.trainer, routing_replay=True))
    claim = factories.trainer_started(config=resolved_json(theirs), hashes={})
    found = disagreement(OURS, "logprob", claim)
    assert "trainer.routing_replay is False here and True there" == found
    assert "" == disagreement(OURS, "rollout", claim)


def test_a_claim_of_a_newer_release_is_refused_by_the_field() -> None:
    """And both releases are named."""
    text = '{"rollout": {"unheard_of": 1}}'
    claim = factories.trainer_started(config=text, versions={"rlstreams": "9.0"}, hashes={})
    found = disagreement(OURS, "rollout", claim)
    assert "rollout.unheard_of" in found
    assert f"rlstreams 9.0 recorded it, and this is {host.release()}" in found


@pytest.mark.parametrize("channel", ["gloo", "nccl"])
def test_hosts_that_pull_need_one_secret(channel: str) -> None:
    """Without one each host would make its own, and refuse the others one by one."""
    weights = replace(OURS.weights, channel=channel, host="10.0.0.5")
    with pytest.raises(ConfigError, match=r"weights\.secret is empty"):
        check_alone(replace(OURS, weights=weights))
    check_alone(replace(OURS, weights=replace(weights, secret="env:SECRET")))
    check_alone(replace(OURS, weights=replace(weights, host="127.0.0.1")))


def test_weights_on_loopback_are_out_of_reach_of_other_hosts() -> None:
    """The trainer's host itself reaches them, and so does anyone by a shared folder."""
    weights = replace(OURS.weights, channel="gloo")
    claim = factories.trainer_started(config=resolved_json(replace(OURS, weights=weights)))
    assert "weights.host is 127.0.0.1" in out_of_reach(claim, "sampler")
    assert "" == out_of_reach(claim, "learner")
    by_file = factories.trainer_started(config=resolved_json(OURS))
    assert "" == out_of_reach(by_file, "sampler")


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.3.0.9", True),
        ("localhost", True),
        ("::1", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000/", True),
        ("10.0.0.1", False),
        ("localhost5", False),
        ("http://127-0.example.org", False),
    ],
)
def test_addresses_that_only_one_host_reaches(address: str, is_own: bool) -> None:
    """By themselves or in a url."""
    assert is_own == is_loopback(address)
