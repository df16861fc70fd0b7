"""Verifiers by name, and sums of them: what an answer earns."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.reward import ALONE, RewardPart, RewardSection
from rlstreams.workers.rollout.quick_verifiers import QUICK_VERIFIERS
from rlstreams.workers.rollout.verifiers import CHILD_VERIFIERS, make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier


def verifier(name: str, parts: tuple[RewardPart, ...] = (), **options: Any) -> Verifier:
    return make_verifier(RewardSection(verifier=name, options=options, parts=parts, processes=1))


def rewards(one: Verifier, cases: list[tuple[str, str]], **metadata: Any) -> list[float]:
    """Of completions with answers."""
    with one:
        return [
            one.judge(AnswerToJudge("?", said, wanted, metadata)).reward for said, wanted in cases
        ]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12,21", "21", 1.0),
        ("~24", "21", 0.0),
        ("~21", "21", 1.0),
        ("12 , 21", "21", 1.0),
        ("the sum is 21.", "21", 1.0),
        ("It is...21", "21.0", 1.0),
        ("-3", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("x=.5", "0.5", 1.0),
        ("21,", "21", 1.0),
        ("none", "21", 0.0),
        ("", "0", 0.0),
    ],
)
def test_numeric_compares_the_last_number(completion: str, answer: str, reward: float) -> None:
    assert [reward] == rewards(verifier("numeric"), [(completion, answer)])


def test_all_of_ours_are_named_in_the_configuration() -> None:
    assert {*ALONE} == {*QUICK_VERIFIERS, *CHILD_VERIFIERS}


def test_an_unfinished_answer_earns_nothing() -> None:
    """What max_new_tokens cut earns 0 although its last number is right."""
    cut = AnswerToJudge("?", "21", "21", {}, "length")
    for require_stop, reward in ((True, 0.0), (False, 1.0)):
        with make_verifier(RewardSection(verifier="numeric", require_stop=require_stop)) as one:
            assert reward == one.judge(cut).reward


def test_the_bound_holds_for_every_verifier() -> None:
    """A weight can make too much of an honest number."""
    parts = (RewardPart(verifier="numeric", weight=1e10),)
    with pytest.raises(RewardError, match=r"got 10000000000\.0"):
        rewards(verifier("sum", parts), [("14", "15"), ("15", "15")])


def test_exact_ignores_white_space_around_and_case_if_asked() -> None:
    cases = [(" a b\n", "a b"), ("ab", "a b"), ("Paris", "paris")]
    assert [1.0, 0.0, 0.0] == rewards(verifier("exact"), cases)
    assert [1.0] == rewards(verifier("exact", ignore_case=True), [("Paris ", "paris")])


def test_numeric_has_a_tolerance_and_thousands() -> None:
    """Off by default: equality, and commas separate."""
    cases = [("3.14", "3.1416"), ("about 1,234", "1234")]
    assert [0.0, 0.0] == rewards(verifier("numeric"), cases)
    assert [1.0, 1.0] == rewards(verifier("numeric", tolerance=0.01, thousands=True), cases)


def test_choice_finds_the_letter_that_was_decided_for() -> None:
    """What is called the answer counts before a letter that stands alone."""
    cases = [
        ("B", "B"),
        ("A cat, so (C).", "c"),
        ("The answer is (B), not A", "B"),
        ("Answer: D. Or C? **Answer: C**", "C"),
        (r"so \boxed{A}, while B is wrong", "A"),
        ("none of them", "A"),
        ("Z", "A"),
    ]
    assert [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0] == rewards(verifier("choice"), cases)
    with pytest.raises(RewardError, match=r"answer '7' is none of the letters ABCD$"):
        rewards(verifier("choice", letters="ABCD"), [("A", "7")])


def test_pattern_is_of_all_rows_or_of_each() -> None:
    """A group is compared with the answer; without one it is enough to be there."""
    cases = [("<a>7</a> no <a> 8 </a>", "8"), ("<a>7</a>", "8"), ("8", "8")]
    assert [1.0, 0.0, 0.0] == rewards(verifier("pattern", pattern="<a>(.*?)</a>"), cases)
    assert [1.0, 1.0, 0.0] == rewards(verifier("pattern", pattern="<a>"), cases)
    assert [1.0, 0.0] == rewards(verifier("pattern"), [("x=12", r"x=\d+"), ("x=y", r"x=\d+")])


@pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs rlstreams[json-schema]")
def test_json_schema_judges_structure(tmp_path: Path) -> None:
    """In a fenced block or bare; the schema is the configuration's, a file's or the row's."""
    schema = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    text = '{"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}'
    (tmp_path / "s.json").write_text(text)
    cases = [('{"x": 1}', text), ('so\n```json\n{"x": 2}\n```\n', text), ('{"x": "1"}', text)]
    cases.append(("no", text))
    for options in ({"schema": schema}, {"schema_file": str(tmp_path / "s.json")}, {}):
        assert [1.0, 1.0, 0.0, 0.0] == rewards(verifier("json-schema", **options), cases)
    with verifier("json-schema", schema=schema) as one:
        assert Judgement(reward=0.0, parts={"parsed": 0.0}) == one.judge(
            AnswerToJudge("", "no", "", {})
        )


def test_a_sum_weighs_its_parts(tmp_path: Path) -> None:
    """Each part's own number is recorded under its name, and so are its parts."""
    file = tmp_path / "form.py"
    file.write_text(
        "def short(prompt, completion, answer, metadata, *, most):\n"
        "    return {'reward': len(completion) <= most, 'length': len(completion)}\n"
    )
    parts = (
        RewardPart(verifier="numeric", name="right"),
        RewardPart(verifier=f"{file}:short", weight=0.5, options={"most": 3}),
    )
    with verifier("sum", parts) as one:
        judged = one.judge(AnswerToJudge("?", "12", "12", {}))
    assert Judgement(reward=1.5, parts={"right": 1.0, "short": 1.0, "short/length": 2.0}) == judged
    with verifier("sum", parts) as one, pytest.raises(RewardError, match=r"part 'right': .*'many'"):
        one.judge(AnswerToJudge("?", "12", "many", {}))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: verifier("exactly"), r"reward\.verifier must be one of 'exact', 'numeric'"),
        (lambda: verifier("numerc"), r"got 'numerc'; did you mean 'numeric'"),
        (lambda: verifier("rewards.py"), r"or your `file.py:function` or .*, got 'rewards.py'"),
        (lambda: verifier("no_such:f"), r"verifier: there is no module 'no_such' in .* nor amo"),
        (lambda: verifier("file.py:"), r"reward\.verifier must be one of 'exact', 'numeric'"),
        (lambda: verifier("numeric", tolerence=1.0), r"has no option 'tolerence'; it has"),
        (lambda: verifier("numeric", tolerance="1"), r"option tolerance must be a float, got '1'"),
        (lambda: verifier("pattern", pat="x"), r"cannot be called with \(prompt, .*, pat\)"),
        (lambda: verifier("sum"), r"parts are for `sum`, and it needs at least one"),
        (lambda: verifier("exact", (RewardPart(verifier="exact"),)), r"parts are for `sum`"),
        (lambda: RewardPart(verifier="sum"), r"reward\.parts\.verifier must be .*, got 'sum'"),
        (lambda: verifier("sum", (RewardPart(verifier="exact"),) * 2), r"two are called 'exact'"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(make: Any, told: str) -> None:
    """Before any answer is judged; options are named."""
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ConfigError, match=r"'math-verify' needs .* pip install 'rlstreams\[math\]'"
    ):
        verifier("math-verify")
