"""The doctor finds what is wrong, says what to do, and starts nothing."""

from __future__ import annotations

import json
import re
import shutil
import socket
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.check.doctor import machine
from rlstreams.check.doctor.check import Host, Level, probed
from rlstreams.check.doctor.diagnose import (
    _of_model,
    diagnose,
    preflight,
)
from rlstreams.check.doctor.model import check_layouts, check_routers, read_model
from rlstreams.streams.broker.jars import num_missing
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "infra/examples/demo.toml"
MODEL = ROOT / "infra/examples/demo/model"
DATA = ROOT / "infra/examples/demo/train.jsonl"
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)


def demo(folder: Path, *overrides: str) -> RunConfig:
    return load([DEMO], [f"--run.dir={folder / 'run'}", *overrides])


def model_with(folder: Path, **changes: object) -> Path:
    copy = folder / "model"
    shutil.copytree(MODEL, copy)
    file = copy / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return copy


def test_the_demo_has_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, every check with a name, and no folder is made."""
    words = ["doctor", str(DEMO), "--json", f"--run.dir={tmp_path / 'run'}"]
    assert 0 == main(words)
    checks = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in checks}
    assert names >= {"disk", "model", "memory", "data.train", "verifier"}
    assert not any(check["level"] == "fail" for check in checks)
    assert [] == list(tmp_path.iterdir())


def test_a_failed_check_says_what_to_do_and_the_rest_is_still_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1; a missing data set does not hide the verdict on the model."""
    words = ["doctor", str(DEMO), f"--run.dir={tmp_path}", "--data.train", str(tmp_path / "no")]
    assert 1 == main(words)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail") and "there is no file" in line for line in lines)
    assert any(line.startswith("ok") and "qwen3_moe" in line for line in lines)


def test_a_reference_that_is_no_model_is_told_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where it is asked for; a whole one is named."""
    words = ["doctor", str(DEMO), f"--run.dir={tmp_path / 'run'}", "--trainer.loss.kl_coef=0.1"]
    assert 0 == main(words)
    assert "reference  " not in capsys.readouterr().out
    assert 1 == main([*words, f"--logprob.reference={tmp_path / 'no'}"])
    assert "logprob.reference: there is no folder" in capsys.readouterr().out
    folder = model_with(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert 1 == main([*words, f"--logprob.reference={folder}"])
    out = capsys.readouterr().out
    assert f"logprob.reference: {folder} has no tokenizer" in out
    assert "model.path: " not in out
    assert 0 == main([*words, f"--logprob.reference={DEMO.parent / 'demo' / 'model'}"])
    assert "264 k parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 100}, r"config.json says .*\(100, 64\), but model.embed_tokens.*\(128, 64"),
        ({"hidden_size": 32}, r"\(128, 32\), but model.embed_tokens.weight is \(128, 64\)"),
        ({"model_type": None}, r"config.json: field 'model_type' is missing"),
        (
            {"architectures": ["Qwen9ForCausalLM"]},
            r"transformers \d[\d.]+ has no class 'Qwen9ForCausalLM' of model_type 'qwen3_moe': "
            r"looked for in .*modeling_qwen3_moe\.py, where Qwen3MoeForCausalLM is nearest; ",
        ),
        (
            {"model_type": "qwen3_mo"},
            r"of model_type 'qwen3_mo': there is no qwen3_mo in .*/models, where qwen3_moe is near",
        ),
        ({"model_type": "zzzz"}, r"there is no zzzz in .*/models; correct architectures, install"),
    ],
)
def test_a_model_folder_that_does_not_fit_together(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    """Told before torch is imported, with file, field and both values."""
    with pytest.raises(ConfigError, match=told):
        read_model(str(model_with(tmp_path, **changes)))


@needs_megatron
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("trainer.ranks=3", "trainer.layout.ep=3"), "ep is 3, .* num_experts, 8: it may be 1, 2,"),
        (
            ("trainer.ranks=3", "trainer.layout.pp=3"),
            "pp is 3, .*_hidden_layers, 2: it may be 1, 2",
        ),
        (("trainer.ranks=2", "trainer.layout.tp=2"), "cut by ep and pp alone: set tp to 1"),
        (("trainer.ranks=3", "trainer.layout.pp=2"), "ranks is 3, which tp 1 x pp 2 = 2 ranks do"),
    ],
)
def test_a_layout_that_does_not_fit_the_model(
    tmp_path: Path, asked: tuple[str, ...], told: str
) -> None:
    """Told before a rank is started, with both numbers and what would fit."""
    config = demo(tmp_path, "--trainer.backend=megatron", *(f"--{one}" for one in asked))
    with pytest.raises(ConfigError, match=told):
        preflight(config)


@needs_megatron
def test_a_family_without_a_table(tmp_path: Path) -> None:
    """Told before a start, by the field that names it and those that have one."""
    config = demo(tmp_path, "--logprob.backend=megatron")
    model = read_model(config.model.path)
    assert "logprob 1 ranks, tp 1, pp 1, ep 1" == check_layouts(config, model)
    shared = demo(
        tmp_path, "--logprob.backend=megatron", "--logprob.ranks=2", "--logprob.layout.tp=2"
    )
    with pytest.raises(ConfigError, match=r"^logprob\.layout\.tp is 2, but a mixture of experts"):
        check_layouts(shared, model)
    biased = replace(model, config={**model.config, "attention_bias": True})
    with pytest.raises(
        ConfigError, match=r"^logprob.backend is .*, model.path is .*attention_bias is"
    ):
        check_layouts(config, biased)
    foreign = replace(model, config={**model.config, "architectures": ["GemmaForCausalLM"]})
    with pytest.raises(ConfigError, match="no table of names for a GemmaForCausalLM; it has thos"):
        check_layouts(config, foreign)


def test_slices_that_do_not_fit_the_heads(tmp_path: Path) -> None:
    """Told with all numbers and what would fit, where the trainer runs."""
    config = demo(tmp_path, "--trainer.ranks=4", "--trainer.layout.cp=4")
    model = read_model(config.model.path)
    assert "trainer 4 ranks, cp 4" == check_layouts(config, model)
    fields = {**model.config, "num_attention_heads": 12, "num_key_value_heads": 6}
    odd = replace(model, config=fields)
    told = r"cp is 4, .* num_attention_heads, 12, and num_key_value_heads, 6: .* 1, 2, 3, 6, 12$"
    with pytest.raises(ConfigError, match=told):
        check_layouts(config, odd)
    assert "" == check_layouts(config, odd, Host(role="logprob"))


def test_a_layout_is_checked_where_its_role_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library need not be installed elsewhere; what was not checked is not told."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    config = demo(tmp_path, "--trainer.backend=megatron")
    model = read_model(config.model.path)
    monkeypatch.setattr("importlib.metadata.version", missing)
    assert [] == list(_of_model(config, model, Host(role="logprob")))
    with pytest.raises(ConfigError, match=r'^trainer.backend is "megatron", but megatron-core is'):
        check_layouts(config, model, Host(role="trainer"))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.19.0")
    assert "trainer 1 ranks, tp 1, pp 1, ep 1" == check_layouts(config, model)
    fields = {name: value for name, value in model.config.items() if name != "intermediate_size"}
    assert "" == check_layouts(config, replace(model, config=fields))


def test_a_weight_file_that_is_cut_or_foreign(tmp_path: Path) -> None:
    file = model_with(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"{file} is no whole safetensors file: .*not fully cov"):
        read_model(str(file.parent))
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=rf"{file} is no whole safetensors file: .*header too"):
        read_model(str(file.parent))


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    """A folder with an index lists its weight files."""
    folder = model_with(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files: model-2.safetensors"):
        read_model(str(folder))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """It would give ids that the embedding has no row for."""
    folder = model_with(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer.setdefault("added_tokens", [])
    added.append({"id": 128, "content": "<new>", "single_word": False, "lstrip": False,
                  "rstrip": False, "normalized": False, "special": True})  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="the tokenizer has 129 tokens, the model only 128"):
        read_model(str(folder))


def test_rows_that_repeat_few_prompts_are_warned_of(tmp_path: Path) -> None:
    """Two copies of each are no news: a file may be given twice."""
    lines = DATA.read_text(encoding="utf-8").splitlines()

    def found(kept: list[str]) -> list[str]:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("\n".join(kept), encoding="utf-8")
        config = demo(tmp_path, f"--data.train={rows}")
        checks = _of_model(config, read_model(config.model.path), Host(role="prompts"))
        return [check.found for check in checks if check.level is Level.WARN]

    (said,) = found(lines[:4] * 8)
    assert said.startswith("32 rows to train on have 4 different prompts")
    assert [] == found(lines[:16] * 2)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        check = machine.port(number, is_broker_up=False)
        assert (Level.FAIL, f"broker.port {number} is in use by another program") == (
            check.level,
            check.found,
        )
        assert Level.OK == machine.port(number, is_broker_up=True).level
    assert Level.OK == machine.port(number, is_broker_up=False).level


def test_a_disk_without_room(tmp_path: Path) -> None:
    """A model of a petabyte fits nowhere."""
    assert Level.FAIL == machine.disk(demo(tmp_path), weights_mb=1e9).level
    assert Level.OK == machine.disk(demo(tmp_path), weights_mb=0).level


def test_a_start_on_a_disk_without_room_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not refused: a short run may fit."""
    monkeypatch.setattr(machine, "LOG_MB", 1e12)
    told: list[str] = []
    preflight(demo(tmp_path), told.append)
    assert [line for line in told if re.match(r"warning: [\d.]+ GB free at .*; free some, ", line)]


@pytest.mark.parametrize(("limit", "user", "says"), [
    (100, 1000, [Level.FAIL]), (100_000, 1000, [Level.OK]), (100, 0, []), (-1, 1000, []),
])  # fmt: skip
def test_too_few_threads_are_told_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, user: int, says: list[Level]
) -> None:
    """Java and Kafka's client end without naming the limit; root has none."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("rlstreams.check.doctor.machine.raise_limit", lambda: 65_536)
    assert says == [check.level for check in machine.threads()]
    if says == [Level.FAIL]:
        with pytest.raises(ConfigError, match=r"this user may have 100 threads.*ulimit -u"):
            preflight(demo(tmp_path))


def test_a_folder_for_kernels_that_cannot_be_made_is_told_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its variable: each role would fail as it imports torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    assert [Level.OK] == [check.level for check in machine.compiler_cache()]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file/below"))
    with pytest.raises(
        ConfigError, match=r"TORCHINDUCTOR_CACHE_DIR is .*cannot be made .*; name a"
    ):
        preflight(demo(tmp_path))


def test_jars_that_are_not_cached_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start would fetch them; a folder that lacks them is a failure."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path))
    assert 46 == num_missing()
    assert Level.WARN == machine.jars("").level
    monkeypatch.setattr("os.access", lambda *_: False)
    unwritable = machine.jars("")
    assert (Level.FAIL, True) == (unwritable.level, "RLSTREAMS_CACHE" in unwritable.advice)
    (check,) = probed("jars", lambda: machine.jars(str(tmp_path)))
    assert (Level.FAIL, True) == (check.level, "does not exist" in check.found)


def test_a_broker_that_is_down(tmp_path: Path) -> None:
    """One failed check for doctor, an error for preflight; both name the address."""
    config = demo(tmp_path, "--broker.bootstrap=127.0.0.1:1")
    (check,) = [c for c in diagnose(config) if c.level is Level.FAIL]
    assert ("broker", True) == (check.name, "127.0.0.1:1" in check.found)
    with pytest.raises(BrokerError, match=r"no broker answers at 127.0.0.1:1: .*refused; start it"):
        preflight(config)


def test_replay_is_promised_of_a_model_with_routers_and_refused_of_a_dense_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started; the family's routers are measured by the roles."""
    words = [str(DEMO), f"--run.dir={tmp_path}", "--trainer.routing_replay=true"]
    assert 0 == main(["doctor", *words])
    assert "recorded routes are replayed" in capsys.readouterr().out
    config, model = load([DEMO], ["trainer.routing_replay=true"]), read_model(str(MODEL))
    check_routers(config, model)
    fields = {name: value for name, value in model.config.items() if "experts" not in name}
    with pytest.raises(ConfigError, match=r"trainer\.routing_replay is true, but .* a dense model"):
        check_routers(config, replace(model, config=fields))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.json", '{"run": {"id": "other"}}', "is the folder of run 'other', and"),
        ("manifest.json", "{}", "is a recording, not a folder of a run"),
        ("", "mine", "is a file"),
    ],
)
def test_a_folder_that_a_start_would_refuse(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    """Before `up` does; the rest is looked at all the same."""
    place = tmp_path / "run" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    checks = {check.name: check for check in diagnose(demo(tmp_path))}
    found = checks["run.dir"]
    assert (Level.FAIL, True) == (found.level, told in found.found)
    assert "verifier" in checks
