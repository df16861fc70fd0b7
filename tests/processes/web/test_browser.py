"""The live page and the report in a real browser, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.show.report.page import render_report
from tests.browser import CHROMIUM, Browser
from tests.factories import dead_letter
from tests.processes.web.made_run import MadeRun, served
from tests.processes.web.made_session import NUM_CALLS, session_events
from tests.unit.report.sample_run import report_input

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
DETAIL = "/home/me/reward.py:7: reward.py:reward raised KeyError: '{}'"
DRAWN = "document.querySelectorAll('.plot .main-svg').length > 3"
POINTS = "document.querySelector('[data-chart] .plot').data.map(line => line.x.length)"
# On a phone a row is a card: each value has its name above it.
NAMELESS = (
    "[...document.querySelectorAll('.wide tbody td:not([data-name]):not([colspan]):not(.who)')]"
    ".map(e => e.outerHTML)"
)
# Texts whose contrast is below WCAG's AA, by element: 4.5 to 1, large ones 3 to 1.
FAINT = """(() => {
  const nums = s => s.match(/[\\d.]+/g).map(Number);
  const light = c => c.map(x => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = nums(getComputedStyle(e).backgroundColor);
    if ((c[3] ?? 1) > 0.99) return c.slice(0, 3);
  } return [255, 255, 255] };
  const found = {}, walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, style = getComputedStyle(e);
    const is_drawn = walk.currentNode.textContent.trim() && e.getClientRects().length;
    if (!is_drawn || e.closest('svg')) continue;
    const [a, b] = [light(nums(style.color).slice(0, 3)), light(ground(e))].sort((a, b) => b - a);
    const ratio = (a + 0.05) / (b + 0.05), is_large = parseFloat(style.fontSize) >= 24;
    if (ratio < (is_large ? 3 : 4.5)) found[`${e.tagName}.${e.className}`] = ratio;
  }
  return found })()"""
HAS = {
    "": "figure[data-chart]", "samples": "th[aria-sort=descending]", "samples/3/1": ".tokens sup",
    "steps": "a[href$='/steps/3']", "steps/3": "pre", "letters": "#letters", "flow": ".flow .topic",
    "samples/70/0": ".calls summary", "configuration": "details",
    "../../compare": "figure[data-chart]",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def run() -> MadeRun:
    run = MadeRun()
    for number in range(1, 31):
        run.make_step(number)
    run.write([*session_events()])
    run.write([dead_letter(group_id=f"{n}", detail=DETAIL.format(n)) for n in range(3)])
    return run


@pytest.fixture(scope="module")
def address(run: MadeRun) -> Iterator[str]:
    with served({"run": run, "other": MadeRun()}) as address:
        yield address


@pytest.mark.parametrize("width", [1280, 390])
def test_each_view_has_its_elements(browser: Browser, address: str, width: int) -> None:
    """Nothing is wider than the window, nothing of the log was run, nobody else was asked."""
    browser.resize(width, 850)
    for view, element in HAS.items():
        browser.open(f"{address}/r/run/{view}", f'document.querySelector("{element}")')
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), view
        assert "rlstreams" in browser.run("document.title")
        assert [] == browser.run(NAMELESS), view
        assert {} == browser.run(FAINT), view
    asked = [url for url in browser.requests if not url.startswith(("about:", "data:"))]
    assert [] == [url for url in asked if not url.startswith(address)]
    assert [] == browser.errors


@pytest.mark.parametrize("width", [1280, 390])
def test_an_answer_is_on_the_first_screen(browser: Browser, address: str, width: int) -> None:
    """To read, without a scroll, also on a phone."""
    browser.resize(width, 850 if width > 400 else 664)
    browser.open(f"{address}/r/run/", "document.querySelector('#answers')")
    answer = "document.querySelector('td[data-name=answer] .said').getBoundingClientRect()"
    assert browser.run(f"{answer}.bottom <= innerHeight")


def test_charts_have_points_and_follow_the_controls(browser: Browser, address: str) -> None:
    """By step, or by time, smoothed, cut; the address says it, so that it can be sent."""
    browser.resize(1280, 2000)
    browser.open(f"{address}/r/run/?smooth=0.5&from=5&to=20", DRAWN)
    assert [30, 30] == browser.run(POINTS)[:2]  # a line, and the smoothed one
    axis = "document.querySelector('[data-chart] .plot').layout.xaxis"
    assert [5, 20] == browser.run(f"{axis}.range")
    browser.run("document.querySelector('input[value=time]').click()")
    browser.wait(f"{axis}.title.text.startsWith('minutes')")
    assert "x=time" in browser.run("location.search")


def test_a_new_step_appears_by_itself(browser: Browser, address: str, run: MadeRun) -> None:
    """In the charts and in the figures, on a page that stays open."""
    browser.resize(1280, 900)
    browser.open(f"{address}/r/run/", DRAWN)
    before = browser.run(POINTS)[0]
    run.make_step(before + 1)
    browser.wait(f"{POINTS}[0] === {before + 1}")
    browser.wait(f"document.getElementById('head').textContent.includes('{before + 1} of')")


def test_every_view_is_reached_by_the_keyboard(browser: Browser, address: str) -> None:
    """What can be clicked can be focused, and has a name."""
    for view in ("", "samples", "samples/3/1", "flow"):
        browser.open(f"{address}/r/run/{view}", "document.querySelector('main')")
        nameless = browser.run(
            "[...document.querySelectorAll('a, button, input:not([type=hidden]), select, summary')]"
            ".filter(e => e.tabIndex < 0 || !(e.textContent || e.closest('label')?.textContent))"
            ".map(e => e.outerHTML)"
        )
        assert [] == nameless


def test_the_report_needs_no_server(browser: Browser, tmp_path: Path) -> None:
    """One file: its charts are drawn, also on a phone, and nothing is fetched."""
    page = tmp_path / "report.html"
    page.write_text(render_report(report_input()), "utf-8")
    browser.resize(390, 2000)
    browser.open("data:text/html,")  # what the page before still asked for is its own
    browser.requests.clear()
    browser.open(f"file://{page}", DRAWN)
    assert [20, 5] == browser.run(POINTS)
    browser.run("document.querySelector('.timeline').scrollIntoView()")
    browser.wait("document.querySelector('.timeline .plot').data?.length > 3")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert [] == [url for url in browser.requests if not url.startswith(("file:", "data:"))]


def test_all_charts_are_in_a_picture_and_on_paper(tmp_path: Path) -> None:
    """In a picture of the whole page that nobody scrolled, and as it is printed: the open ones,
    each with the colour of its line in its box, and no wider than the sheet."""
    page = tmp_path / "report.html"
    page.write_text(render_report(report_input()), "utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"file://{page}", "document.body?.dataset.drawn !== undefined")
        top = "document.querySelector('figure[data-chart]').getBoundingClientRect().top"
        assert browser.run(f"{top} < 0.7 * innerHeight"), "a chart is on the first screen"
        on_screen = painted(browser, tmp_path)
        assert ["entropy", "learning", "loss", "staleness", "throughput"] == sorted(on_screen)
        assert all(on_screen.values()), on_screen
        browser.as_on_paper(718)
        assert painted(browser, tmp_path).keys() == on_screen.keys()
        assert all(painted(browser, tmp_path).values())
        widths = "[...document.querySelectorAll('.main-svg')].map(svg => svg.clientWidth)"
        assert max(browser.run(widths)) <= 718
        browser.paper(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")


def painted(browser: Browser, folder: Path) -> dict[str, bool]:
    """By chart: whether the colour of its first line is in its box."""
    browser.screenshot(folder / "whole.png", whole=True)
    from matplotlib.image import imread

    pixels = (imread(folder / "whole.png")[..., :3] * 255).round().astype(int)
    boxes = browser.run(
        "Object.fromEntries([...document.querySelectorAll('figure[data-chart]')]"
        ".filter(f => !f.closest('details:not([open])')).map(f => {"
        "const r = f.querySelector('.plot').getBoundingClientRect();"
        "return [JSON.parse(f.dataset.chart).id,"
        "[r.x, r.y + scrollY, r.right, r.bottom + scrollY]]}))"
    )
    line = (0x08, 0x60, 0xCA)  # --a of page.css
    found = {}
    for name, (left, top, right, bottom) in boxes.items():
        box = pixels[int(top) : int(bottom), int(left) : int(right)]
        found[name] = int((abs(box - line).max(axis=2) < 40).sum()) > 50
    return found


def test_a_word_is_searched_and_a_text_unfolded(browser: Browser, address: str) -> None:
    """By the keyboard alone; the answer is on the first screen, on a desktop and on a phone."""
    for width in (1280, 390):
        browser.resize(width, 850)
        browser.open(f"{address}/r/run/samples", "document.querySelector('td[data-name=answer]')")
        top = "document.querySelector('td[data-name=answer]').getBoundingClientRect().bottom"
        assert browser.run(f"{top} < 850")
    browser.run("document.querySelector('input[name=text]').value = '404142'")
    browser.run("document.querySelector('form[role=search]').requestSubmit()")
    browser.wait("location.search.includes('404142') && document.querySelector('.answers')")
    assert browser.run("document.body.innerText.includes('“404142”')")


def test_siblings_are_beside_each_other(browser: Browser, address: str) -> None:
    """On a desktop several in a row, on a phone one below the other."""
    rows = "new Set([...document.querySelectorAll('.siblings li')].map(e => e.offsetTop)).size"
    for width, expected in ((1280, 2), (390, 8)):
        browser.resize(width, 850)
        browser.open(f"{address}/r/run/samples/3", "document.querySelector('.siblings li')")
        assert expected == browser.run(rows)


def test_a_run_without_dead_letters_says_what_one_is(browser: Browser, address: str) -> None:
    """And names no command that would list none."""
    for run, has_letters in (("run", True), ("other", False)):
        browser.open(f"{address}/r/{run}/letters", "document.querySelector('#letters')")
        said = browser.run("document.querySelector('#letters').innerText")
        assert (
            has_letters == ("rlstreams dead-letters list" in said) != ("A dead letter is" in said)
        )


def test_a_place_in_the_log_stands_in_one_line_on_a_phone(browser: Browser, address: str) -> None:
    """An offset that goes on in the next line reads as two numbers."""
    browser.resize(420, 850)
    browser.open(f"{address}/r/run/samples/3/1", "document.querySelector('.tokens sup')")
    lines = browser.run("""[...document.querySelectorAll('td[data-name="in the log"]')].map(td => {
      const range = document.createRange(); range.selectNodeContents(td);
      return [td.innerText, range.getClientRects().length] })""")
    assert any(place.startswith("scored-trajectories[") for place, _ in lines)
    assert {1} == {num for _, num in lines}, lines


def test_a_session_is_there_at_once_and_unfolds(browser: Browser, address: str) -> None:
    """Thirty calls within half a second; a row unfolds by the keyboard to all that was said."""
    browser.resize(390, 850)
    rows, took_s = "document.querySelectorAll('.calls > li').length", []
    for _ in range(3):
        browser.open(f"{address}/r/run/samples/3/1", f"{rows} === 0 && document.title")
        took_s.append(browser.open(f"{address}/r/run/samples/70/0", f"{rows} === {NUM_CALLS}"))
    assert min(took_s) < 0.5, took_s
    row = "document.querySelector('.calls details')"
    assert not browser.run(f"{row}.innerText.includes('You are a librarian. '.repeat(29))")
    browser.run(f"{row}.querySelector('summary').click()")
    assert browser.run(f"{row}.innerText.includes('You are a librarian. '.repeat(29))")
