"""What `rlstreams init` makes of what a newcomer has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.json
import pyarrow.parquet
import pytest

from rlstreams.__main__ import main
from rlstreams.check.project.columns import guess_columns
from rlstreams.check.project.start import (
    SMALL_MODEL,
    from_file,
    from_gsm8k,
    read_rows,
)
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import DataSection
from rlstreams.workers.config.engine import NAMED_CACHE
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.open import first_rows
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge

ROOT = Path(__file__).parents[3]


def rows_file(folder: Path, *rows: object) -> Path:
    file = folder / "my.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return file


def project(folder: Path, *words: str) -> RunConfig:
    """The configuration of a project in `folder/x`."""
    assert 0 == main(["init", str(folder / "x"), *words])
    return load([folder / "x/run.toml"])


def reward_of(config: RunConfig, completion: str, answer: str) -> float:
    with make_verifier(config.reward) as verifier:
        return verifier.judge(AnswerToJudge("", completion, answer, {})).reward


def test_a_project_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configuration, reward with its test, twenty rows, a short README, a model to begin with."""
    config = project(tmp_path)
    folder = tmp_path / "x"
    assert "x" == config.run.id
    assert str(folder / "model") == config.model.path
    assert 20 == len((folder / "rows.jsonl").read_text().splitlines())
    assert 12 >= len((folder / "README.md").read_text().splitlines())
    assert 16 == len(first_rows(config.data, 99)) - config.data.held_out_rows
    done = subprocess.run(
        [sys.executable, "test_reward.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "20 rows: the reward is as expected\n" == done.stdout
    told = capsys.readouterr().out
    assert "cd " in told
    assert "it will hardly learn anything else" in told


def test_a_project_of_an_agent(tmp_path: Path) -> None:
    """A function with its test; its last answer is judged as ever. It is not a process for each
    answer: on two cores a step of 64 took 20 s so, and a newcomer saw nothing rise."""
    config = project(tmp_path, "--agent")
    folder = tmp_path / "x"
    (agent,) = config.agent
    assert ("solver", f"{folder / 'solver.py'}:solve") == (agent.name, agent.python)
    assert config.rollout.slots == config.trainer.groups_per_step * config.prompts.group_size
    assert 1.0 == reward_of(config, "8,18", "18")
    done = subprocess.run(
        [sys.executable, "test_solver.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "the agent asks as expected\n" == done.stdout
    assert "python test_solver.py" in (folder / "README.md").read_text()


def test_an_agent_writes_its_own_messages(tmp_path: Path) -> None:
    """So of rows that a model would be given as a chat, the text alone."""
    config = project(tmp_path, "--agent", "--from", "gsm8k", "--model", "hf:Qwen/Qwen3-0.6B")
    assert not config.data.is_always_chat
    assert config.agent


def test_the_test_of_a_project_follows_its_reward(tmp_path: Path) -> None:
    """An option, named parts, and `async def`: as `up` would call it."""
    project(tmp_path)
    folder = tmp_path / "x"
    own = """
async def reward(prompt, completion, answer, metadata, *, weight):
    return {"right": weight * (completion == answer), "short": 0.2}
"""
    (folder / "reward.py").write_text(own, "utf-8")
    run = (folder / "run.toml").read_text("utf-8")
    (folder / "run.toml").write_text(f"{run}\n[reward.options]\nweight = 0.5\n", "utf-8")
    words = [sys.executable, "test_reward.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert "20 rows: the reward is as expected\n" == done.stdout
    (folder / "reward.py").write_text(own.replace("0.2", "not completion"), "utf-8")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert "AssertionError: {'prompt': " in done.stderr


def test_a_model_without_a_chat_template_gets_text(tmp_path: Path) -> None:
    """Its rows are not made messages, which it could not take; those of a chat model are."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "infra/examples/demo/model", model)
    file = rows_file(tmp_path, *({"prompt": f"capital of {n}?", "answer": "x"} for n in range(9)))
    config = project(tmp_path, "--from", str(file), "--model", str(model))
    assert "auto" == config.data.chat
    assert "" == from_gsm8k_config(tmp_path, model).data.system_prompt
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", "utf-8")
    shutil.rmtree(tmp_path / "x")
    config = project(tmp_path, "--from", str(file), "--model", str(model))
    assert "always" == config.data.chat


def from_gsm8k_config(folder: Path, model: Path) -> RunConfig:
    assert 0 == main(["init", str(folder / "math"), "--from", "gsm8k", "--model", str(model)])
    return load([folder / "math/run.toml"])


def test_numbers_are_compared_as_numbers_and_text_as_text(tmp_path: Path) -> None:
    """The reward that is written fits the answers that were found."""
    file = rows_file(tmp_path, {"question": "1+1=", "target": 2})
    config = project(tmp_path, "--from", str(file))
    assert [1.0, 0.0, 0.0] == [reward_of(config, text, "2") for text in ("1,2.0", "3", "")]
    other = tmp_path / "words"
    other.mkdir()
    file = rows_file(other, {"prompt": "capital of France?", "answer": "Paris"})
    config = project(other, "--from", str(file))
    assert [1.0, 0.0] == [reward_of(config, text, "Paris") for text in (" paris\n", "Lyon")]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "answer": "b"}, "", ""),
        ({"question": "a", "solution": "b"}, "question", "solution"),
        ({"problem": "a", "target": 3}, "problem", "target"),
        ({"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}},
         "", "reward_model.ground_truth"),
    ],
)  # fmt: skip
def test_columns_are_guessed_by_their_names(
    row: dict[str, object], prompt: str, answer: str
) -> None:
    """Ours need not be named in the configuration; those of other systems are."""
    columns = guess_columns(Path("f"), [row], "", "").data.columns
    assert (prompt, answer) == (columns.prompt, columns.answer)


def test_columns_that_cannot_be_guessed_are_listed(tmp_path: Path) -> None:
    """With the option that names them; and that option is enough."""
    file = rows_file(tmp_path, {"frage": "1+1=", "antwort": "2", "id": 7})
    with pytest.raises(ConfigError, match=r"its columns \(antwort, frage, id\) .* --prompt COLUMN"):
        from_file(tmp_path / "x", file, "", "", "")
    plan = from_file(tmp_path / "x", file, "", "frage", "antwort")
    assert ["id"] == plan.columns.others


def test_all_columns_that_cannot_be_guessed_are_asked_for_at_once(tmp_path: Path) -> None:
    """With the first row, so that one look is enough."""
    file = rows_file(tmp_path, {"frage": "1+1=" * 50, "antwort": 2}, {"frage": "", "antwort": ""})
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path / "x", file, "", "", "")
    told = str(caught.value)
    assert "name them: --prompt COLUMN --answer COLUMN" in told
    assert re.search(r"first row: frage: \"1\+1=1.{60,80}\.\.\., antwort: 2$", told)
    with pytest.raises(ConfigError, match=r"\(the answer\); name it: --answer COLUMN; the first"):
        from_file(tmp_path / "x", file, "", "frage", "")


@pytest.mark.parametrize("words", [("fragen", "antwort"), ("frage", "antwort.text")])
def test_a_column_that_is_not_there_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    """It would be found at the first row of the run, and named then only."""
    file = rows_file(tmp_path, {"frage": "1+1=", "antwort": "2"})
    wrong = "--prompt fragen" if "fragen" in words else "--answer antwort.text"
    with pytest.raises(ConfigError, match=f"{wrong}: .* has no such column; .* frage: .1"):
        from_file(tmp_path / "x", file, "", *words)


def test_rows_may_be_a_table(tmp_path: Path) -> None:
    """With quoted line ends and a mark at the start; its values are text; a torn row is named."""
    table = tmp_path / "my table.csv"
    table.write_text('prompt,answer\n"1+1=",2\n"a, ""b""\nc",3\n', encoding="utf-8-sig")
    plan = from_file(tmp_path / "x", table, "", "", "")
    assert (2, True) == (len(plan.rows), plan.columns.is_numeric)
    found = first_rows(DataSection(train=str(table)), 9)
    assert [("1+1=", "2"), ('a, "b"\nc', "3")] == [(row.prompt, row.answer) for row in found]
    table.write_text("prompt\tanswer\na\tb\nc\n", "utf-8")
    table = table.rename(tmp_path / "my.TSV")
    with pytest.raises(ConfigError, match=r"my\.TSV: row 2: it has not the 2 columns of the first"):
        first_rows(DataSection(train=str(table)), 9)


def test_rows_need_no_answers(tmp_path: Path) -> None:
    """Prompts alone: the reward that is written says where to put one, and its test passes."""
    file = rows_file(tmp_path, *({"prompt": f"Tell me about {n}."} for n in range(9)))
    config = project(tmp_path, "--from", str(file))
    assert "" == first_rows(config.data, 1)[0].answer
    assert reward_of(config, "one two", "") < reward_of(config, "a " * 12, "")
    words = [sys.executable, "test_reward.py"]
    done = subprocess.run(words, cwd=tmp_path / "x", capture_output=True, text=True, check=False)
    assert "9 rows: the reward is as expected\n" == done.stdout, done.stderr


def test_a_note_is_no_part_of_a_sum(tmp_path: Path) -> None:
    """The test that is written beside a reward takes one that says why."""
    project(tmp_path)
    own = "def reward(prompt, completion, answer, metadata):\n"
    own += "    return {'right': completion == answer, 'note': 'as told'}\n"
    (tmp_path / "x/reward.py").write_text(own, "utf-8")
    words = [sys.executable, "test_reward.py"]
    done = subprocess.run(words, cwd=tmp_path / "x", capture_output=True, text=True, check=False)
    assert "the reward is as expected" in done.stdout, done.stderr


def test_a_project_from_a_gym(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its own scorer and no reward to write; a task that is not there is named."""
    pytest.importorskip("reasoning_gym")
    config = project(tmp_path, "--from", "gym:chain_sum")
    assert ("gym:chain_sum", "reasoning-gym") == (config.data.train, config.reward.verifier)
    assert not (tmp_path / "x/reward.py").exists()
    assert 78 == main(["init", str(tmp_path / "y"), "--from", "gym:chain_sun"])
    assert "--from: reasoning-gym has no task 'chain_sun'; did you mean" in capsys.readouterr().err


def test_rows_may_be_parquet(tmp_path: Path) -> None:
    file = tmp_path / "my.parquet"
    lines = "".join(f'{{"question": "{n}+1=", "target": {n + 1}}}\n' for n in range(30))
    table = pyarrow.json.read_json(pyarrow.BufferReader(lines.encode()))
    pyarrow.parquet.write_table(table, file)
    config = project(tmp_path, "--from", str(file))
    assert (str(file), 6) == (config.data.train, config.data.held_out_rows)
    assert "3+1=" == first_rows(config.data, 4)[3].prompt
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"--from: .*no\.parquet: no readable Parquet"):
        from_file(tmp_path / "y", tmp_path / "no.parquet", "", "", "")


def test_rows_that_the_demo_cannot_write_get_another_model(tmp_path: Path) -> None:
    """It knows numbers and signs; words, chats and long problems need a real model."""
    for row in (
        {"prompt": "Add two and two", "answer": "4"},
        {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"},
        {"prompt": "1+" * 70 + "1=", "answer": "71"},
    ):
        assert SMALL_MODEL == from_file(tmp_path / "x", rows_file(tmp_path, row), "", "", "").model
    sums = rows_file(tmp_path, {"prompt": "1+1=", "answer": "2"})
    assert "" == from_file(tmp_path / "x", sums, "", "", "").model
    assert "mine" == from_file(tmp_path / "x", sums, "mine", "", "").model


def test_a_share_is_held_out(tmp_path: Path) -> None:
    """A tenth of many rows, a fifth of few, none of one."""

    def held_out(count: int) -> list[str]:
        rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(count)]
        lines = from_file(tmp_path / "x", rows_file(tmp_path, *rows), "", "", "").data_lines
        return [line.partition(" #")[0] for line in lines if line.startswith("held_out")]

    assert [["held_out_fraction = 0.1"], ["held_out_rows = 4"], []] == [
        held_out(count) for count in (200, 20, 1)
    ]


def test_gsm8k_is_named_and_its_rows_are_ours(tmp_path: Path) -> None:
    """Twenty of its form lie beside it; the answer is the number behind the working."""
    config = project(tmp_path, "--from", "gsm8k")
    assert ("hf:openai/gsm8k:main@train", "gsm8k") == (config.data.train, config.data.preset)
    assert SMALL_MODEL == config.model.path
    rows = [json.loads(line) for line in (tmp_path / "x/rows.jsonl").read_text().splitlines()]
    assert 20 == len(rows)
    assert all(re.fullmatch(r"[\d.]+", row["answer"]) for row in rows)
    assert from_gsm8k(tmp_path, "mine").model == "mine"


@pytest.mark.parametrize("words", [("--from", "gsm8k"), ("--model", "hf:some/model")])
def test_a_real_model_gets_limits_of_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """A step of minutes is no stall, and the test split does not come ahead of the first one."""
    config = project(tmp_path, *words)
    told = capsys.readouterr().out
    assert "Steps take minutes on a CPU" in told
    assert re.search(r"up +# minutes a step on a CPU\n", told)
    example = load([ROOT / "infra/examples/reasoning_gym.toml"])
    assert example.deadlines == config.deadlines
    assert example.model.threads == config.model.threads
    assert (64, 10) == (config.prompts.evaluate_rows, config.prompts.evaluate_every)
    assert (example.rollout, example.logprob) == (config.rollout, config.logprob)
    assert example.trainer == config.trainer


@pytest.mark.parametrize(("num", "expected"), [(1, ("0", 0.3, 4e9)), (2, ("1", 0.85, None))])
def test_a_project_for_gpus(tmp_path: Path, num: int, expected: tuple[object, ...]) -> None:
    """It runs as it is: nothing is left to uncomment, and the server lies where it has room. On a
    GPU that it shares, its cache is not measured while others allocate."""
    config = project(tmp_path, "--from", "gsm8k", "--gpus", str(num))
    assert not re.search("#gpu", (tmp_path / "x/run.toml").read_text("utf-8"))
    assert ("vllm", "cuda:0") == (config.rollout.engine, config.trainer.device)
    engine, share = config.engine, "gpu-memory-utilization"
    assert expected == (
        engine.env["CUDA_VISIBLE_DEVICES"], engine.args[share], engine.args.get(NAMED_CACHE)
    )  # fmt: skip
    assert (config.weights.channel, config.rollout.slots) == ("nccl", 256)
    assert config.trainer.groups_per_step * config.prompts.group_size == 256
    # No compiler is needed, the cache holds the longest sequence, a tenth more right is no noise.
    assert "0" == config.engine.env["VLLM_USE_FLASHINFER_SAMPLER"]
    assert config.engine.args["max-model-len"] >= 4 * config.rollout.max_new_tokens
    assert 256 == config.prompts.evaluate_rows


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--from", "gsm8k", "--gpus", "4"], "1 or 2, got 4"),
        (["--gpus", "1"], "name one by --model"),
    ],
)
def test_gpus_that_have_no_template(
    tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 78 == main(["init", str(tmp_path / "x"), *words])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_lines_for_gpus_need_only_be_uncommented(tmp_path: Path) -> None:
    """As the file says; each role has its device, and no field is written twice."""
    usual = project(tmp_path, "--from", "gsm8k")
    file = tmp_path / "x/run.toml"
    command = re.search(r"sed .*run\.toml$", file.read_text(), re.MULTILINE)
    assert command
    subprocess.run(command[0], shell=True, cwd=file.parent, check=True)
    assert not re.search("^#gpu", file.read_text(), re.MULTILINE)
    config = load([file])
    assert ("cuda:0", "auto") == (config.trainer.device, config.logprob.device)
    assert ("vllm", "nccl", "bfloat16") == (
        config.rollout.engine, config.weights.channel, config.model.dtype
    )  # fmt: skip
    assert "1" == config.engine.env["CUDA_VISIBLE_DEVICES"]
    assert ("bfloat16", 0.85) == (
        config.engine.args["dtype"], config.engine.args["gpu-memory-utilization"]
    )  # fmt: skip
    assert (usual.prompts, usual.deadlines) == (config.prompts, config.deadlines)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"prompt": "a", "answer": "b"}\n{\n', r"my\.jsonl:2:2: not a line of JSON"),
        (b"[1]\n", r"my\.jsonl:1: not a JSON object"),
        (b"\n\n", r"my\.jsonl has no rows"),
        (b"\xff\n", r"my\.jsonl:1: not UTF-8 \(byte 0xff at position 0\); save the file as UTF-8"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "my.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        from_file(tmp_path / "x", file, "", "", "")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_rows(tmp_path / "nowhere.csv")
    assert [file] == list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a project nor a file; an empty folder is fine."""
    (tmp_path / "x").mkdir()
    project(tmp_path)
    for name, file in (("x", "x/run.toml"), ("y", "y")):
        (tmp_path / file).write_bytes(b"mine")
        assert 78 == main(["init", str(tmp_path / name)])
        assert "is there and not empty" in capsys.readouterr().err
        assert b"mine" == (tmp_path / file).read_bytes()


def test_commands_find_the_project_that_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without CONFIG they take ./run.toml, and say so where there is none."""
    monkeypatch.chdir(tmp_path)
    assert 78 == main(["doctor"])
    assert "no CONFIG is named and there is no run.toml" in capsys.readouterr().err
    project(tmp_path)
    monkeypatch.chdir(tmp_path / "x")
    assert 0 == main(["doctor"])
    assert "trainer 0.5 GB from measured peaks; " in capsys.readouterr().out
