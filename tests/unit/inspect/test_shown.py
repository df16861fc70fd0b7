"""What people see of a sample: on the terminal, in pipes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console, RenderableType

from rlstreams.debug.inspect.terminal import seconds_text, table, whole
from rlstreams.schemas.events import Segment
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.words.sample_detail import SampleDetail, sample_detail
from rlstreams.words.spelling import NUMBERS, Spelling
from rlstreams.words.texts import short, text_of
from tests import factories as f
from tests.unit.inspect import told_run

SPELLING = Spelling(decode=told_run.decode, plain=told_run.decode, hash=f.HASH)
SAMPLES = ("0/0", "1/0", "2/0", "3/0", "4/0", "4/1", "e1-7/0")


def details(*samples: str, spelling: Spelling = SPELLING) -> list[SampleDetail]:
    ids = [SampleId.parse(sample) for sample in samples]
    return [sample_detail(one, spelling) for one in told_run.bus_log().samples(*map(str, ids))]


def printed(drawn: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=180, color_system=None)
    console.print(drawn)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_tells_the_same() -> None:
    """Figures, tokens, worst tokens and every stage with its place."""
    told = printed(whole(details("1/0")[0]))
    for words in (
        "trained   step 2   reward 1   mismatch 0.5   staleness 0,1   tokens 6   versions 0,1",
        "<bos>2+3=56<eos>56<eos>",
        "+5.00e-01",
        "issued",
        "trajectories[",
        "made by step 2",
        "later records of the same sample, which nobody uses: trajectories[",
    ):
        assert words in told


def test_what_a_run_says_is_no_markup_and_no_command_to_the_terminal() -> None:
    """Tokens like `[/INST]`, the title, an answer and a letter are shown as they are."""
    words = "[/INST][i]:x:\x1b[2J"
    shown = "[/INST][i]:x:\\x1b[2J"
    (sample,) = details("1/0", spelling=Spelling(decode=said(words), plain=str, hash=f.HASH))
    drawn = re.sub(r"\s*\n\s*", "", printed(whole(sample)))
    assert 11 + len(sample.worst_tokens(5)) == drawn.count(shown)
    assert f"{shown}: all" in printed(table([sample], f"{words}: all"))
    letter = f.dead_letter(group_id="7", sample=0, detail=words)
    prompt = f.prompt(group_id="7", sample=0, group_size=2, answer=words)
    (found,) = told_run.bus_log([prompt, letter]).samples("7/0")
    drawn = printed(whole(sample_detail(found, SPELLING)))
    assert f"rollout-0: reward, {shown}" in drawn
    assert f"expected {shown}" in drawn


def said(word: str) -> Callable[[Sequence[int]], str]:
    """A decoder that says the same for every token."""
    return lambda token_ids: word * len(token_ids)


def test_what_is_missing_is_told() -> None:
    trajectory = told_run.rollout("7", 0, 0)[1]
    (found,) = told_run.bus_log([trajectory]).samples("7/0")
    shown = sample_detail(found, SPELLING)
    expected = "not in this log, removed or not recorded: its prompt, load rollout-0/0"
    assert expected in printed(whole(shown))


def test_a_narrow_terminal_has_the_places_too() -> None:
    """Behind the words instead of in a column of their own."""
    wide, narrow = (printed(whole(details("0/0")[0], width=width)) for width in (120, 100))
    assert "where" in wide
    assert "where" not in narrow
    assert "reward 1  trajectories[" in narrow


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_fate_can_be_shown(sample: str) -> None:
    assert sample in printed(whole(details(sample)[0]))


def test_another_tokenizer_is_noticed() -> None:
    """Wrong words would be worse than none."""
    other = Spelling(decode=told_run.decode, plain=told_run.decode, hash="other")
    (found,) = details("0/0", spelling=other)
    assert "tokens are numbers: the run had another tokenizer" == found.problem
    assert "5 " == found.words[5]
    assert "" == details("0/0", spelling=NUMBERS)[0].problem


def test_tensors_that_do_not_fit_are_named() -> None:
    """The lineage is shown all the same."""
    prompt, trajectory, scored = told_run.scored("7", 0, 0)
    del scored
    broken = f.scored(trajectory, scores=(f.score(2, 0),))  # type: ignore[arg-type]
    (found,) = told_run.bus_log([prompt, trajectory, broken]).samples("7/0")
    shown = sample_detail(found, SPELLING)
    assert "its tokens cannot be read: a segment of 3 tokens" in shown.problem
    assert 3 == len(shown.stages)
    assert "cannot be read" in printed(whole(shown))


def test_a_long_text_is_cut_in_a_list_only() -> None:
    """A sample in full has all of it."""
    prompt, *_ = told_run.rollout("7", 0, 0)
    long = f.trajectory(
        group_id="7",
        sample=0,
        segments=(
            f.prompt_segment(5),
            f.policy_segment(3000, 0, token_ids=f.int32s(3000)),
        ),
    )
    (found,) = told_run.bus_log([prompt, long]).samples("7/0")
    shown = sample_detail(found, SPELLING)
    assert 3005 == len(shown.words)
    assert "…" in printed(table([shown], ""))


def test_seconds_are_told_as_people_do() -> None:
    """Milliseconds where they matter, minutes where they do not."""
    expected = ["+0.120 s", "-0.001 s", "+12.3 s", "+3 min"]
    assert expected == [seconds_text(s) for s in (0.12, -0.001, 12.345, 181.0)]


def test_a_rollout_without_a_token_is_shown() -> None:
    """An engine that was stopped at once."""
    event = f.trajectory(group_id="7", sample=0, segments=())
    (found,) = told_run.bus_log([event]).samples("7/0")
    shown = sample_detail(found, SPELLING)
    assert "7/0" in printed(whole(shown))


def test_turns_of_an_answer_stand_apart_everywhere() -> None:
    """On the terminal, and in rows of the page; a pull within a turn does not cut it."""
    environment = Segment(author="environment", token_ids=f.int32s(1, 3))
    policy = [f.policy_segment(1, version, token_ids=f.int32s(1, 5)) for version in (0, 1, 1)]
    segments = (f.prompt_segment(1), *policy[:2], environment, policy[2])
    event = f.trajectory(group_id="7", sample=0, segments=segments)
    (lineage,) = told_run.bus_log([event]).samples("7/0")
    expected = "policy: 55 environment: 3 policy: 5"
    assert expected in printed(table([sample_detail(lineage, SPELLING)], "one"))
    assert expected == short(text_of(event, SPELLING).answer)
    alone = f.trajectory(group_id="7", sample=0, segments=segments[:3])
    assert "55" == text_of(alone, SPELLING).answer


def test_parts_stand_on_one_line_where_there_is_room() -> None:
    """Beside a short prompt and a short answer, also on 80 columns."""
    event = f.trajectory(group_id="7", sample=0, reward_parts={"right": 0.0, "working": 0.225})
    (lineage,) = told_run.bus_log([event]).samples("7/0")
    detail = sample_detail(lineage, SPELLING)
    for width, told in ((160, "right 0, working 0.225"), (80, "right 0, working")):
        assert told in printed(table([detail], "one", width))
