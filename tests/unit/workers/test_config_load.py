"""A configuration is understood, or refused with file, field and value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.across import length_warning, loss_warnings, start_warning
from rlstreams.workers.config.load import from_json, load, read_json, resolved_json
from rlstreams.workers.config.run import RunConfig


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_merge_deeply_and_overrides_win(tmp_path):
    """Later files replace single fields, overrides come last."""
    base = write(tmp_path, "[trainer]\nsteps = 5\n[trainer.optimizer]\nlr = 1e-3\nbeta1 = 0.8\n")
    more = write(tmp_path, "[trainer.optimizer]\nlr = 1e-4\n", "more.toml")
    config = load([base, more], ["--trainer.steps", "7", "rollout.slots=3", "--run.seed=2"])
    assert (7, 3, 2) == (config.trainer.steps, config.rollout.slots, config.run.seed)
    assert (1e-4, 0.8) == (config.trainer.optimizer.lr, config.trainer.optimizer.beta1)


def test_the_mark_of_windows_editors_is_no_text(tmp_path):
    """They begin a file of UTF-8 with a byte-order mark."""
    assert 5 == load([write(tmp_path, "\ufeff[trainer]\nsteps = 5\n")]).trainer.steps


@pytest.mark.parametrize(
    ("override", "section", "expected"),
    [
        ("run.id=7", "run", "7"),
        ("run.id=quick", "run", "quick"),
        ('run.id="quoted"', "run", "quoted"),
    ],
)
def test_overrides_of_text_need_no_quotes(override, section, expected):
    """Also where the text looks like a number."""
    assert expected == getattr(load([], [override]), section).id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[trainer]\nstps = 3",
            r"run.toml:2:1: unknown field trainer.stps; did you mean trainer.steps\?",
        ),
        ("[trainr]\nsteps = 3", r"run.toml:1:1: unknown field trainr; did you mean trainer\?"),
        ("[trainer]\nlr = 3", r"did you mean trainer.optimizer.lr\?"),
        ("[demo]\nkills = [{role='rollout', at=0.3, when=1}]", r"demo.kills\[0\].when"),
        ("[trainer]\nsteps = 'ten'", r":2:1: trainer.steps must be a whole number, got 'ten'"),
        ("[trainer]\nsteps = 1.5", r"trainer.steps must be a whole number, got 1.5"),
        ("[trainer]\nsteps = true", r"trainer.steps must be a whole number, got True"),
        ("[trainer]\non_stale = 'keep'", r"trainer.on_stale must be one of 'mask', 'drop'"),
        ("[trainer.optimizer]\nlr = nan", r"trainer.optimizer.lr .*not a finite number"),
        ("trainer = 3", r"run.toml:1:1: trainer is a table, got 3"),
        ("[demo]\nkills = 3", r"demo.kills must be an array of tables, got 3"),
        ("[trainer]\nsteps = 0", r"run.toml:2:1: trainer.steps must be above 0, got 0"),
        ("[run]\nid = 'a/b'", r"run.toml:2:1: run.id must be 1 to 100 letters"),
        ("[run]\nid = ''", r"run.id must be"),
        ("[run]\ndir = '~/runs'", r"run.dir must be a path without `~`, .*, got '~/runs'"),
        ("[run]\ndir = 'runs/{name}'", r"run.dir must be a path with no other braces"),
        ("[trainer]\nmin_group_samples = 9", r"trainer.min_group_samples is 9, but prompts.group"),
        ("[prompts]\nevaluate_every = 2", r"prompts.evaluate_every is 2, but data.held_out is em"),
        ("[broker]\nreplication = 3", r"broker.replication is 3, but broker.bootstrap is empty"),
        ("[rollout]\ntemperature = 0", r":2:1: rollout.temperature is 0: the likeliest token"),
        ("[prompts]\ngroup_size = 1", r":2:1: prompts.group_size is 1: a sample without siblings"),
        (
            "[prompts]\ngroup_size = 1\n[trainer]\nequal_rewards = 'drop'\n"
            "[trainer.loss]\nadvantage = 'reward'",
            r"equal_rewards is 'drop', but prompts.group_size is 1: .* each would be dropped",
        ),
        ("[rollout]\nsample_deadline_s = 700", r":2:1: trainer.group_deadline_s is 1200, but ro"),
        ("[trainer.loss]\nclip_dual = 1", r":2:1: trainer.loss.clip_dual must be above 1, or 0"),
        ("[trainer.loss]\nreduce = 'constant'", r"'constant' and trainer.loss.constant_tokens is"),
        ("[trainer.loss]\nconstant_tokens = 9", r":2:1: trainer.loss.reduce is 'token' and tra"),
        ("[trainer.loss]\nkind = 'gpso'", r":2:1: .* got 'gpso'; did you mean 'gspo'\?"),
        ("[trainer.loss]\nadvantage = 'max_rl'", r"got 'max_rl'; did you mean 'maxrl'\?"),
        ("[trainer.loss]\nweight_cap = 0.5", r":2:1: trainer.loss.weight_cap is 0.5, below 1"),
        ("[trainer.loss]\nproximal = 'behavior'", r"truncation, masks, rejection and normalisat"),
        (
            "[trainer.loss]\nproximal = 'interpolated'\nweight_normalize = true",
            r"weight_normalize is true, but with trainer.loss.proximal 'interpolated'",
        ),
        ("[trainer.loss]\nkind = 'sft'", r"'sft', but trainer.loss.advantage is 'grpo', which"),
        (
            "[trainer.loss]\nkind = 'sft'\nadvantage = 'one'",
            r"correction is 'truncate', but .* set 'none'",
        ),
        (
            "[trainer.loss]\nkind = 'sft'\nadvantage = 'one'\ncorrection = 'none'\n"
            "proximal = 'step_start'",
            r"proximal is 'step_start', but trainer.loss.kind 'sft' has no ratio",
        ),
        (
            "[trainer]\nsteps = 5\n[trainer.loss]\nadvantage = 'gae'\nvalue_warmup_steps = 5",
            r"value_warmup_steps is 5, but trainer.steps is 5: the policy would never learn",
        ),
        ("[trainer.loss]\nadvantage = 'one'", r"'one' with trainer.loss.kind 'ppo' and .*min 0"),
        (
            "[trainer]\ncontrol = 'permuted'\n[trainer.loss]\nkind = 'sft'\nadvantage = 'one'\n"
            "correction = 'none'",
            r"control is 'permuted', but .* no reward counts",
        ),
        (
            "[trainer.loss]\nadvantage = 'maxrl'\noverlong_tokens = 12",
            r"advantage is 'maxrl' and trainer.loss.overlong_tokens is 12: 'maxrl' is defined for",
        ),
        ("[trainer.loss]\nkl_weight = 'ratio'", r"kl_weight is 'ratio', but .*kl_coef is 0"),
        ("[trainer.loss]\noverlong_tokens = 9000", r"overlong_tokens is 9000 .* most \d+ tokens"),
        (
            "[trainer]\nranks = 3\nhosts = ['b:29400']",
            r"trainer.ranks is 3, which 2 hosts \(the trainer's, and trainer.hosts\) do not share",
        ),
        ("[trainer]\nhosts = ['b']\nranks = 2", r"hosts must be like host:port, got 'b'"),
        (
            "[trainer]\nranks = 2\nhosts = ['b:29400']",
            r"hosts is \['b:29400'\], but weights.secret is empty: whoever reaches a rank",
        ),
        ("[trainer]\nminibatches = 3", r":2:1: trainer.minibatches is 3, which does not divide"),
        ("[trainer.optimizer]\nschedule = 'cosine'", r"'cosine' and .*decay_steps is 0: the one n"),
        (
            "[trainer.optimizer]\nschedule = 'cosine'\ndecay_steps = 5",
            r"decay_steps is 5, but trainer.optimizer.warmup_steps is 5: nothing is left",
        ),
        ("[broker.options]\n'sasl.password' = 'x'", r"'?sasl.password is a secret: give it as env"),
        ("[broker]\nsasl_mechanism = 'PLAIN'", r"broker.sasl_mechanism; broker has bootstrap, "),
        ("[rollout]\nengin = 'x'", r"rollout.engin; did you mean rollout.engine\?"),
        ("[[demo.kills]]\nrole = 1\nat = 0", r"must be an array of tables, .* at \[0\].role"),
        ("[trainer\nsteps = 3", r"run.toml:1:9: malformed TOML"),
        ("[trainer]\nsteps = ", r"run.toml:2:9: malformed TOML"),
        ("[trainer]\nname = 'x", r"run.toml:2:\d+: malformed TOML"),
        ("[run]\nid = my-run", r"2:6: malformed TOML: Invalid value; a text stands in quotes"),
        ("[trainer]\nsteps = 1\nsteps = 2", r":3:10: .*value; the field is set above already"),
        ('[run]\nid = "x\n', r"2:8: malformed TOML: Illegal .*; its closing quote is missing"),
        ("[trainer]\nsteps 3", r"2:7: .*; a line is `field = value`, or a `\[section\]`"),
        (f"[trainer]\nsteps = {2**63}", r":2:1: trainer.steps must .*\(more than 63 bits\)"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    """The message names the file, the dotted field, the value and what was wanted."""
    with pytest.raises(ConfigError, match=message):
        load([write(tmp_path, text)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--trainer.steps"], "override --trainer.steps has no value"),
        (["--trainer.steps", "--run.id=x"], "--trainer.steps has no value; write --trainer.steps "),
        (["--trainer.steps", "ten"], "override --trainer.steps: trainer.steps must be a whole nu"),
        (["--trainer.stps", "3"], r"override --trainer.stps: .* did you mean trainer.steps\?"),
        (["trainer=3"], "trainer is a table, got 3"),
        (["trainer.steps.more=3"], "unknown field trainer.steps.more"),
        (["weights.window_s=0.1"], "weights.window_s is no field any more: leave it out"),
        (["trainer.steps=0"], "override --trainer.steps: trainer.steps must be above 0, got 0"),
        (["trainer.loss.kl_coef=-1"], "trainer.loss.kl_coef must be 0 or above, got -1"),
        (["logprob.reference=other"], "logprob.reference is .*other', but trainer.loss.kl_coef is"),
    ],
)
def test_bad_overrides_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load([], overrides)


@pytest.mark.parametrize(
    ("holds", "advice"),
    [
        ("run.toml", r"x is a folder; name its .*x/run.toml"),
        ("notes.txt", "x is a folder; a CONFIG is a TOML file"),
    ],
)
def test_a_folder_is_no_file(tmp_path, holds, advice):
    """A project, or neither it nor a run: each is told what to name."""
    write(tmp_path / "x", "", holds)
    with pytest.raises(ConfigError, match=advice):
        load([tmp_path / "x"])


def test_a_runs_folder_is_what_up_left_in_it(tmp_path):
    """Under where it is now, with overrides over it; a model's folder is none."""
    left = load([], ["trainer.steps=7", f"run.dir={tmp_path / 'gone'}"])
    write(tmp_path / "x", resolved_json(left), "config.json")
    found = load([tmp_path / "x"], ["trainer.steps=9"])
    assert (9, str(tmp_path / "x")) == (found.trainer.steps, found.folder)
    write(tmp_path / "x", '{"model_type": "qwen3"}', "config.json")
    with pytest.raises(ConfigError, match="x is a folder; a CONFIG is a TOML file"):
        load([tmp_path / "x"])


def test_file_that_is_no_text(tmp_path):
    """A binary file is refused, not half read."""
    path = tmp_path / "model.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        load([path])


def test_paths_are_relative_to_the_file_that_sets_them(tmp_path, monkeypatch):
    """Files below another folder still find their data; overrides use the working directory."""
    monkeypatch.chdir(tmp_path)
    text = (
        "[data]\ntrain = '../data/t.jsonl'\n[model]\npath = 'model'\n"
        "[reward]\nverifier = 'judge.py:score'\n[run]\ndir = 'out/{id}'\nid = 'r'\n"
        "[logprob]\nreference = 'base'\n[trainer.loss]\nkl_coef = 0.1"
    )
    config = load([write(tmp_path, text, "conf/run.toml")], ["data.held_out=h.jsonl"])
    assert str(tmp_path / "data/t.jsonl") == config.data.train
    assert str(tmp_path / "h.jsonl") == config.data.held_out
    assert str(tmp_path / "conf/model") == config.model.path
    assert str(tmp_path / "conf/base") == config.logprob.reference
    assert f"{tmp_path / 'conf/judge.py'}:score" == config.reward.verifier
    assert "out/r" == config.folder
    config = load([write(tmp_path, text)], ["data.held_out=~no-such-user/h.jsonl"])
    assert str(tmp_path / "~no-such-user/h.jsonl") == config.data.held_out  # then it is not there


def test_secrets(tmp_path, monkeypatch):
    """References are resolved on use; the resolved configuration shows only the reference."""
    monkeypatch.setenv("RLSTREAMS_TEST_PW", "hunter2")
    secret = write(tmp_path, "hunter3\n", "pw")
    file = write(tmp_path, "[broker.options]\n'ssl.key.password' = 'file:pw'")
    config = load([file], ["broker.options.sasl.password=env:RLSTREAMS_TEST_PW"])
    options = config.broker.options
    assert f"file:{secret}" == options["ssl.key.password"]
    assert "hunter3" == resolve_secret(options["ssl.key.password"])
    assert "hunter2" == resolve_secret(options["sasl.password"])
    assert "plain" == resolve_secret("plain")
    assert "hunter" not in resolved_json(config)
    for reference in ("env:RLSTREAMS_TEST_NONE", f"file:{tmp_path / 'none'}"):
        with pytest.raises(ConfigError, match=reference.partition(":")[2]):
            resolve_secret(reference)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broker.options.sasl.password", "hunter2"),
        ("track.mlflow.uri", "https://me:hunter2@mlflow:5000/"),
    ],
)
def test_a_literal_secret_is_not_repeated_in_the_message(name, value):
    """What is refused as a secret is not printed either."""
    with pytest.raises(ConfigError, match=f"{name} (is a secret|holds a password)") as raised:
        load([], [f"{name}={value}"])
    assert "hunter2" not in str(raised.value)


def test_a_recorded_configuration_is_what_was_computed_with():
    """Of a version that knew fewer fields: the values that it had, and no check of a start."""
    tree = json.loads(resolved_json(RunConfig()))
    del tree["trainer"]["loss"]["clip_dual"], tree["trainer"]["loss"]["lone"]
    del tree["trainer"]["shared_prefixes"], tree["logprob"]["shared_prefixes"]
    tree["trainer"]["group_deadline_s"] = 600.0
    # These nothing reads any more.
    tree["weights"] |= {"hold_s": 10.0, "window_s": 0.1, "snapshot": "none"}
    tree["engine"]["routers"], tree["deadlines"]["fence_s"] = [], 35.0
    recorded = from_json(json.dumps(tree))
    assert (0.0, "reward") == (recorded.trainer.loss.clip_dual, recorded.trainer.loss.lone)
    assert 600.0 == recorded.trainer.group_deadline_s
    for section in ("trainer", "logprob"):
        shares = [getattr(c, section).shared_prefixes for c in (recorded, RunConfig())]
        assert shares == [False, True]
    assert (3.0, "zero") == (RunConfig().trainer.loss.clip_dual, RunConfig().trainer.loss.lone)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.top_p=0.9", "rollout.top_p is 0.9 and rollout.top_k is 0: the sampler's log-pro"),
        ("rollout.top_k=40", "rollout.top_p is 1 and rollout.top_k is 40: the sampler's log-probs"),
        ("rollout.temperature=0.7", ""),
    ],
)
def test_a_start_is_warned_of_a_cut_distribution(override, told):
    """It runs, and its gradient is biased."""
    warning = start_warning(load([], [override]))
    assert told == warning[: len(told)]
    assert bool(told) == bool(warning)


@pytest.mark.parametrize(
    ("max_turns", "longest", "told"),
    [
        (
            4,
            None,
            "may have 20,000 tokens, but trainer.micro_batch_tokens is 16384. One that is lon",
        ),
        (4, 17000, "may have 17,000 tokens, the model's longest sequence, but trainer.micro_batch"),
        (4, 16384, ""),
        (3, None, ""),
        (1, None, ""),
    ],
)
def test_a_start_is_warned_of_turns_beyond_a_micro_batch(max_turns, longest, told):
    """Of all turns together, as far as the model's longest sequence lets them grow."""
    config = load(
        [],
        [
            "environment.name=game.py:Game",
            f"environment.max_turns={max_turns}",
            "rollout.max_new_tokens=5000",
        ],
    )
    warning = length_warning(config, longest)
    assert told in warning
    named = f"environment.max_turns is {max_turns} and rollout.max_new_tokens is 5000: "
    assert bool(told) == warning.startswith(named)


@pytest.mark.parametrize(
    ("max_new_tokens", "longest", "is_warned"),
    [(16384, None, True), (16383, None, False), (20000, 16384, False), (20000, 16385, True)],
)
def test_a_start_is_warned_of_an_answer_beyond_a_micro_batch(max_new_tokens, longest, is_warned):
    """With its prompt, of one token at least; it is a micro-batch of its own, as turns are."""
    warning = length_warning(load([], [f"rollout.max_new_tokens={max_new_tokens}"]), longest)
    assert is_warned == warning.startswith(f"rollout.max_new_tokens is {max_new_tokens}: a sample")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "recorded configuration: line 1"),
        ("[]", "must be an object"),
        (json.dumps({"trainer": {"future": 1}}), "unknown field trainer.future"),
    ],
)
def test_foreign_json_is_refused(text, message):
    """A configuration of another release is not half understood."""
    with pytest.raises(ConfigError, match=message):
        from_json(text)


def test_the_configuration_of_a_newer_run_s_folder_is_refused_with_what_to_do(tmp_path):
    """Nobody edits that file: a newer `up` wrote the field. A wrong value is said as ever."""
    file = tmp_path / "config.json"
    said = {}
    for name, tree in {"newer": {"future": 1}, "wrong": {"steps": "many"}}.items():
        file.write_text(json.dumps({"trainer": tree}))
        with pytest.raises(ConfigError, match=f"trainer.{next(iter(tree))}") as refused:
            read_json(file)
        said[name] = str(refused.value).endswith(
            "a newer rlstreams than this one wrote it: take that one"
        )
    assert {"newer": True, "wrong": False} == said


GSPO = ["trainer.loss.kind=gspo", "trainer.loss.clip_low=3e-4", "trainer.loss.clip_high=4e-4"]


def test_gspo_s_own_bounds_are_warned_of_where_samples_are_old():
    """Staleness alone would clip most tokens. To the step's start, on fresh samples, or with wider
    bounds it does not."""
    (warning,) = loss_warnings(load([], GSPO))
    assert "clip_low is 0.0003 and trainer.loss.clip_high is 0.0004" in warning
    at_start = ["trainer.loss.proximal=step_start", "trainer.minibatches=2"]
    wider = ["trainer.loss.clip_low=0.03", "trainer.loss.clip_high=0.04"]
    for more in (at_start, ["trainer.max_staleness=0"], wider, ["trainer.loss.kind=ppo"]):
        assert [] == list(loss_warnings(load([], GSPO + more)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trainer.loss.proximal=step_start"], "kind 'ppo' bounds nothing, only the importance"),
        (["trainer.loss.proximal=step_start", "trainer.batch_epochs=2"], ""),
        (["trainer.loss.proximal=step_start", "logprob.place=trainer"], ""),
        (
            ["trainer.equal_rewards=drop", "trainer.loss.advantage=reinforce++"],
            "'reinforce++': it does not compare within the group, so groups of equal rewards",
        ),
        (["trainer.equal_rewards=drop"], ""),
    ],
)
def test_what_other_trainers_usually_do_is_warned_of(words, told):
    """verl has one update of a batch, and filters groups beside any advantage."""
    assert [True] * bool(told) == [told in warning for warning in loss_warnings(load([], words))]
