"""The live page over HTTP: what each address answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rlstreams.show.report.collect import collect
from rlstreams.show.report.page import render_report
from rlstreams.show.web.beside import LOG, listening, web_page
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_log import BusLog
from tests import factories
from tests.factories import NOW_MS
from tests.html_pages import Balance
from tests.processes.web.made_run import EVIL, MadeRun, served
from tests.processes.web.made_session import NUM_CALLS, session_events
from tests.unit.report.sample_run import audit_report
from tests.waiting import until

VIEWS = (
    "",
    "samples",
    "steps",
    "steps/3",
    "samples/3/1",
    "samples/50/0",
    "samples/70/0",
    "samples/3",
    "samples?text=rewarded",
    "letters",
    "flow",
    "configuration",
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    run = MadeRun()
    for number in range(1, 6):
        run.make_step(number)
    run.write([factories.dead_letter(detail=EVIL, reason="<b>reward", worker=EVIL)])
    odd = factories.policy_segment(3, token_ids=factories.int32s(3, start=-9))
    run.write([factories.trajectory(group_id="50", sample=0, segments=(odd,))])
    asked = factories.prompt_segment()
    said = factories.policy_segment(200, token_ids=factories.int32s(200, start=7))
    long = factories.trajectory(
        group_id="60", sample=0, segments=(asked, said), reward_parts={"form": 0.5, "right": 1.0},
        reward_note="Because it is LONG: a long way", finished_at_ms=NOW_MS + 10_000_000,
    )  # fmt: skip
    held_out = factories.trajectory(
        group_id="e0-0", sample=0, purpose="evaluate", finished_at_ms=NOW_MS + 20_000_000
    )
    run.write([long, held_out])
    run.write([*session_events()])
    run.write([factories.worker_report(worker="rollout-0", detail=EVIL, state="waiting")])
    with served({"run": run, "other": MadeRun()}) as address, httpx.Client(base_url=address) as got:
        yield got


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_whole_and_runs_nothing_of_the_log(client: httpx.Client, view: str) -> None:
    """Tags balance, what the log says is text, and the browser is told to run our files alone."""
    answer = client.get(f"/r/run/{view}")
    assert 200 == answer.status_code, answer.text
    balance = Balance()
    balance.feed(answer.text)
    assert [] == balance.open
    assert "<img src=x" not in answer.text
    assert "\x1b" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("?step=5", "5/7"),
        ("?sort=reward&up=1&page=1", "1/0"),
        ("?sort=step&up=0", "5/0"),
        ("?step=2&sort=at_ms&up=1", "2/0"),
        ("?ended=length", "5/4"),
        ("?reward_max=0&version=3", "4/6"),
    ],
)
def test_samples_are_sorted_and_filtered(client: httpx.Client, query: str, first: str) -> None:
    """By address alone, so that it can be sent to somebody."""
    body = client.get(f"/r/run/samples{query}").text.partition("<tbody>")[2]
    assert first == body.partition('<a href="/r/run/samples/')[2].partition('"')[0]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("?text=LONG+WAY", ["60/0"]),
        ("?text=because+it+is+long", ["60/0"]),
        ("?text=long&purpose=evaluate", []),
        ("?text=", ["60/0"]),
    ],
)
def test_samples_are_found_by_what_was_said(
    client: httpx.Client, query: str, names: list[str]
) -> None:
    """In prompt, answer or the reward's note, in either case, beside the other filters."""
    page = client.get(f"/r/run/samples{query}").text
    found = re.findall(r'<td class="who"><a href="/r/run/samples/([^"]+)"', page)
    assert names == found[: len(names)]
    assert names or "no sample fits" in page


def test_a_row_has_prompt_answer_and_the_parts_of_its_reward(client: httpx.Client) -> None:
    """Cut in the middle; all of it is one click away. Training samples come first."""
    page = client.get("/r/run/samples").text
    row = page.partition('samples/60/0"')[2].partition("</tr>")[0]
    assert "form 0.5, right 1" in row
    assert "Because it is LONG" in row
    cut, _, whole = row.partition('data-name="answer"')[2].partition('<div class="said">')
    assert " … " in cut
    assert len(whole) > len(cut)
    assert page.index("samples/60/0") < page.index("samples/e0-0/0")


def test_a_trained_sample_leads_to_its_step(client: httpx.Client) -> None:
    """From a row of any list, and from its own page."""
    row = client.get("/r/run/samples").text.partition('samples/3/1"')[2].partition("</tr>")[0]
    address, _, rest = row.partition('data-name="outcome"><a href="')[2].partition('">')
    assert rest.startswith("step ")
    step = client.get(address).text
    assert 'samples/3/1"' in step
    number = address.rpartition("/")[2]
    assert f'<a href="/r/run/steps/{number}">' in client.get("/r/run/samples/3/1").text


def test_siblings_stand_side_by_side(client: httpx.Client) -> None:
    """Each answer of the group with its reward, under one prompt."""
    page = client.get("/r/run/samples/3").text
    assert 8 == page.count('<div class="said" tabindex="0"')
    assert 1 == page.count("<h2>Prompt</h2>")
    assert 404 == client.get("/r/run/samples/77").status_code


def test_colours_of_tokens_are_one_click_away(client: httpx.Client) -> None:
    """Folded under the text, open where a colour was asked for."""
    page = client.get("/r/run/samples/3/1").text
    assert '<details id="tokens"><summary>' in page
    assert "<details><summary>receipt of 3/1: " in page
    assert '<details id="tokens" open>' in client.get("/r/run/samples/3/1?color=logprob").text


def test_the_run_shows_answers_before_its_charts(client: httpx.Client) -> None:
    """Loss, KL, entropy and gradient norm open, mismatches folded with their like."""
    page = client.get("/r/run/").text
    order = ('id="answers"', "Reward and held-out", "&#34;loss&#34;", "&#34;kl&#34;",
             "&#34;entropy&#34;", "&#34;grad_norm&#34;", "Timeline")  # fmt: skip
    places = [page.index(words) for words in order]
    assert sorted(places) == places


def test_a_session_shows_what_was_said_call_by_call(client: httpx.Client) -> None:
    """What is new, the answer and its tools; starts, branches, and outcomes in their order."""
    page = client.get("/r/run/samples/70/0").text
    rows = page.partition('<ol class="calls"')[2].partition("</ol>")[0].split("<li class=")[1:]
    assert NUM_CALLS == len(rows)
    titled = next(row for row in rows if "On &lt;b&gt;authors" in row)
    assert "auxiliary" in titled
    assert "no call&#39;s messages begin these" in titled
    (branch,) = [row for row in rows if "branch of #2" in row]
    assert branch.startswith('"beside l1"')
    assert 3 == rows.index(branch)  # behind the call that it leaves, before what goes straight on
    second = rows[1]
    assert "Page 0: x" in second
    assert "You are a librarian" not in second  # its parent was told
    assert "search({&#34;page&#34;: 1})" in second
    assert "from the log in start 1" in second
    assert '<li class="bad">start 0' in page
    outcomes = page.partition('<ol class="outcomes">')[2].partition("</ol>")[0]
    places = [outcomes.index(words) for words in ("I gave up", "form 0.5", "Right, but slow.")]
    assert sorted(places) == places
    assert '<li class="muted">agent: reward 0' in outcomes
    assert 1 == outcomes.count("after the close")


def test_the_run_has_a_row_for_each_agent(client: httpx.Client) -> None:
    """Where there are any; each column says what it means."""
    row = client.get("/r/run/").text.partition("<h2>Agents</h2>")[2].partition("</table>")[0]
    assert '<td data-name="agent">solver</td><td data-name="sessions">1 ended</td>' in row
    assert 'title="Sampled tokens that are not on the main chain."' in row
    assert '<td data-name="call, p95, s" class="num">0.7</td>' in row
    assert "<h2>Agents</h2>" not in client.get("/r/other/").text


def test_a_report_has_the_same_row() -> None:
    """Read from the log, `calls` included."""
    run = MadeRun()
    run.make_step(1)
    run.write([*session_events()])
    with BusLog(run.bus, "run") as log:
        page = render_report(collect(log, "run", audited=audit_report()))
    assert '<td data-name="agent">solver</td><td data-name="sessions">1 ended</td>' in page


def test_no_step_links_to_one_that_is_not_there(client: httpx.Client) -> None:
    assert 'rel="next"' in client.get("/r/run/steps/4").text
    assert 'rel="next"' not in client.get("/r/run/steps/5").text
    assert 'rel="prev"' not in client.get("/r/run/steps/1").text


def test_a_step_has_its_batch_and_the_command_to_do_it_again(client: httpx.Client) -> None:
    """As `replay step` takes it."""
    page = client.get("/r/run/steps/3").text
    assert "rlstreams replay step 3 runs/run" in page
    assert 8 == page.count('<td class="who"><a href="/r/run/samples/3/')


@pytest.mark.parametrize(
    "view", ["samples", "steps", "steps/3", "letters", "flow", "configuration"]
)
def test_a_column_of_times_says_that_they_are_utc(client: httpx.Client, view: str) -> None:
    heads = re.findall(
        r'data-name="([^"]*)"[^>]*>\d{4}-\d\d-\d\d \d\d:', client.get(f"/r/run/{view}").text
    )
    assert heads
    assert all(head.endswith(" (UTC)") for head in heads), heads


def test_dead_letters_by_reason(client: httpx.Client) -> None:
    assert "&lt;b&gt;reward" in client.get("/r/run/letters").text
    assert "0 newest by other" in client.get("/r/run/letters?reason=other").text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/r/nobody/", 404, "there is no run nobody here; there are run, other"),
        ("/r/run/samples/99/0", 404, "does not know sample 99/0"),
        ("/r/run/samples/%3Cb%3E/0", 404, "a sample is written GROUP/SAMPLE"),
        ("/r/run/steps/77", 404, "has no step 77"),
        ("/r/run/samples?step=x", 400, "step must be a whole number, got &#39;x&#39;"),
        ("/r/run/nothing", 404, "<p>Not Found: /r/run/nothing</p>"),
    ],
)
def test_what_is_not_there_is_said(client: httpx.Client, path: str, status: int, said: str) -> None:
    answer = client.get(path)
    assert (status, True) == (answer.status_code, said in answer.text), answer.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:9402", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("localhost:9402", 200),
        ("[::1]:9402", 200),
        ("10.0.0.7", 200),
    ],
)
def test_other_names_of_this_address_are_refused(
    client: httpx.Client, host: str, status: int
) -> None:
    """A page of elsewhere whose name was pointed at us reads nothing (DNS rebinding)."""
    assert status == client.get("/r/run/steps.csv", headers={"Host": host}).status_code


def test_a_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    """By the option that was typed, before anything else is done."""
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be had"):
            listening("127.0.0.1", port)
        with (
            pytest.raises(ConfigError, match=f"--web {port} cannot be had"),
            web_page(tmp_path, port, lambda _: None),
        ):
            raise AssertionError("it was had")


def test_a_page_that_cannot_be_shown_does_not_stop_its_run(tmp_path: Path) -> None:
    """Its process says why in its log."""
    (tmp_path / LOG).parent.mkdir()
    said: list[str] = []
    with web_page(tmp_path, 0, said.append):
        asyncio.run(until(lambda: "no config.json" in (tmp_path / LOG).read_text("utf-8"), "no"))
    assert re.fullmatch(r"page: http://127.0.0.1:\d+/", said[0])


def test_a_browser_that_leaves_costs_nothing(client: httpx.Client) -> None:
    """Streams that are cut in the middle; the page answers on."""
    for _ in range(20):
        with client.stream("GET", "/events") as stream:
            assert "data: new" == next(stream.iter_lines())
    assert 200 == client.get("/r/run/").status_code
