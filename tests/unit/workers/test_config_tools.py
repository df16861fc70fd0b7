"""Files that extend others, who set what, the schema for editors, the page of fields."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rlstreams.__main__ import main
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.docs import SYMPTOMS, field_docs, json_schema, page
from rlstreams.workers.config.layers import toml_places
from rlstreams.workers.config.load import check_secrets, load, load_with_origins
from rlstreams.workers.config.loss import ADVANTAGES, KINDS
from rlstreams.workers.config.reward import RewardSection
from tests.unit.workers.test_config_load import write

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "infra" / "examples" / "demo.toml"
PAGE = ROOT / "infra" / "docs" / "configuration.md"


def test_a_file_stands_on_what_it_extends(tmp_path: Path) -> None:
    """Bases come from left to right, each behind its own; paths belong to the file they are in."""
    write(
        tmp_path, "[trainer]\nsteps = 1\ngroups_per_step = 1\n[data]\ntrain = 'a.jsonl'", "a/a.toml"
    )
    write(
        tmp_path,
        "extends = 'a/a.toml'\n[trainer]\nsteps = 2\n[trainer.optimizer]\nlr = 2.0",
        "b.toml",
    )
    write(tmp_path, "[trainer.optimizer]\nlr = 3.0\nbeta1 = 0.5", "c.toml")
    run = write(tmp_path, "extends = ['b.toml', 'c.toml']\n[trainer.optimizer]\nbeta1 = 0.25")
    config = load([run])
    assert (2, 1) == (config.trainer.steps, config.trainer.groups_per_step)
    assert (3.0, 0.25) == (config.trainer.optimizer.lr, config.trainer.optimizer.beta1)
    assert str(tmp_path / "a" / "a.jsonl") == config.data.train


def test_a_file_stands_on_an_example_of_the_package(tmp_path: Path) -> None:
    """By name, wherever rlstreams is installed; paths in the example are the example's own."""
    run = write(tmp_path, "extends = 'example:demo.toml'\n[trainer]\nsteps = 3")
    config = load([run])
    assert (3, 16) == (config.trainer.steps, config.trainer.groups_per_step)
    assert str(DEMO.parent / "demo/model") == config.model.path


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"run.toml": "x = 1"}, r"run\.toml:1:1: unknown field x"),
        (
            {"run.toml": "\nextends = 'no.toml'"},
            r"run\.toml:2:1: extends names .*no\.toml, which is",
        ),
        ({"run.toml": "extends = 3"}, r"run\.toml:1:1: extends must be a file name or an array"),
        (
            {"run.toml": "\nextends = 'example:no.toml'"},
            r"run\.toml:2:1: extends names 'example:no\.toml': .* neither in .*there .*demo\.toml",
        ),
        ({"run.toml": "extends = 'example:demo'"}, r"run\.toml:1:1: extends names .*demo, which"),
        (
            {"run.toml": "extends = 'b.toml'", "b.toml": "extends = 'run.toml'"},
            r"b\.toml:1:1: extends goes round: run\.toml -> b\.toml -> run\.toml",
        ),
        (
            {"run.toml": "extends = 'b.toml'", "b.toml": "[trainer]\nstps = 3"},
            r"b\.toml:2:1: unknown field trainer\.stps",
        ),
    ],
)
def test_what_cannot_be_extended(tmp_path: Path, files: dict[str, str], told: str) -> None:
    """The file and place of the word that is wrong are named."""
    for name, text in files.items():
        write(tmp_path, text, name)
    with pytest.raises(ConfigError, match=told):
        load([tmp_path / "run.toml"])


def test_two_files_that_disagree_are_both_named(tmp_path: Path) -> None:
    """Each is right by itself."""
    one = write(tmp_path, "[prompts]\ngroup_size = 4", "one.toml")
    two = write(tmp_path, "[trainer]\nmin_group_samples = 5", "two.toml")
    told = r"one\.toml:2:1, .*two\.toml:2:1: trainer\.min_group_samples is 5, but prompts\.group"
    with pytest.raises(ConfigError, match=told):
        load([one, two])


def test_every_key_has_a_place() -> None:
    """Also behind texts and arrays of many lines, quoted and dotted keys, comments."""
    text = (
        "top = '''a = 1\n[no]'''  # x = 1\n[ a . 'b.c' ]\n  d.e = [ # [z]\n 'y = 1',\n]\n"
        '[[f]]\n"g" = { h = "]" }\ni = """\n\\"""j = 1"""\n'
    )
    tomllib.loads(text)
    expected = {"top": (1, 1), "a.b.c": (3, 1), "a.b.c.d.e": (4, 3), "f": (7, 1)}
    expected |= {"f.g": (8, 1), "f.i": (9, 1)}
    assert expected == toml_places(text)


def test_why_tells_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the field is, and each word on it; the last one counts."""
    base = write(tmp_path, "[trainer.optimizer]\nlr = 1e-3", "base.toml")
    run = write(tmp_path, "extends = 'base.toml'\n[trainer.optimizer]\nlr = 1e-4")
    words = ["config", "show", str(run), "--why", "trainer.optimizer.lr"]
    assert 0 == main([*words, "--trainer.optimizer.lr", "1e-5"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "trainer.optimizer.lr = 1e-05" == lines[0]
    assert [
        "set by",
        f"{base}:2:1  0.001",
        f"{run}:3:1  0.0001",
        "override --trainer.optimizer.lr  1e-05",
    ] == lines[-4:]
    assert 0 == main(["config", "show", str(run), "--why", "reward.timeout_s"])
    out = capsys.readouterr().out
    assert "Time limit for one call of user code, or one request to a judge." in out
    assert "not set: this is the default" in out
    assert 78 == main(["config", "show", str(run), "--why", "reward.timeout"])
    assert "did you mean reward.timeout_s?" in capsys.readouterr().err


def test_free_tables_are_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is TOML again, and the same configuration."""
    text = (
        "[reward]\nverifier = 'json-schema'\n[reward.options.schema]\ntype = 'object'\n"
        "[data]\nfew_shot = [{prompt = 'a', answer = 'b'}]\n[data.gym.options]\nmax_terms = 3\n"
    )
    run = write(tmp_path, text)
    assert 0 == main(["config", "show", str(run)])
    printed = write(tmp_path, capsys.readouterr().out, "printed.toml")
    assert load([run]) == load([printed])
    assert {"schema": {"type": "object"}} == load([printed]).reward.options


def test_the_schema_knows_what_we_know(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a schema, the demo is right by it, a mistyped field is not."""
    assert 0 == main(["config", "schema"])
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(json_schema())
    demo = tomllib.loads(DEMO.read_text())
    assert validator.is_valid(demo)
    assert validator.is_valid({**demo, "extends": ["base.toml"]})
    assert not validator.is_valid({"trainer": {"stps": 3}})
    assert not validator.is_valid({"trainer": {"steps": "3"}})
    for name in (
        "numeric",
        "numeric.py",
        "a b:c",
        "grade.py:grade",
        "C:/ö ö/g.py:f",
        "p.q:ä",
        "x:1 ",
    ):
        try:
            is_known = bool(RewardSection(verifier=name))
        except ConfigError:
            is_known = False
        assert is_known == validator.is_valid({"reward": {"verifier": name}}), name
    part = {"verifier": "sum", "weight": 1.0}
    assert not validator.is_valid({"reward": {"verifier": "sum", "parts": [part]}})
    offered = {"trainer.loss.kind": KINDS, "trainer.loss.advantage": ADVANTAGES}
    for field, names in offered.items():
        loss = schema["$defs"]["LossSection"]["properties"][field.rpartition(".")[2]]
        assert list(names) == loss["anyOf"][0]["enum"], field
        assert names[0] == loss["default"]
    described = schema["$defs"]["TrainerSection"]["properties"]["steps"]["description"]
    assert "Optimizer steps after which the run ends." == described


def test_every_field_is_explained() -> None:
    """A sentence, and what one sees when it should be another value; none is left over."""
    assert [] == [doc.name for doc in field_docs() if not doc.sentence or not doc.symptom]
    known = {doc.name for doc in field_docs() if doc.symptom}
    assert len(known) == len(re.findall(r"^\S+ *= *\"", SYMPTOMS.read_text(), re.MULTILINE))


def test_the_page_of_fields_is_fresh() -> None:
    """Else: `rlstreams config fields > infra/docs/configuration.md`."""
    assert page() == PAGE.read_text(encoding="utf-8")


def test_a_secret_that_is_not_set_is_told_before_a_start(tmp_path: Path) -> None:
    """With file, line and field; what is set passes."""
    run = write(tmp_path, "[data]\ntoken = 'env:RLSTREAMS_TEST_NONE'")
    told = (
        r"run\.toml:2:1: environment variable RLSTREAMS_TEST_NONE is not set \(wanted by data\.tok"
    )
    with pytest.raises(ConfigError, match=told):
        check_secrets(load_with_origins([run]))
    (tmp_path / "t").write_text("secret\n")
    check_secrets(load_with_origins([write(tmp_path, "[data]\ntoken = 'file:t'")]))
    with pytest.raises(
        ConfigError, match=r"run\.toml:2:1: data\.token is a secret: give it as env"
    ):
        load([write(tmp_path, "[data]\ntoken = 'hunter2'")])
