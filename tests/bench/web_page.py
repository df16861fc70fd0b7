"""The live page of a large run: seconds until it opens, and until a page of samples is there.

    python tests/bench/web_page.py [--steps N] [--samples N] [--save]

The log lies in memory: 1,000 steps of 100 samples. *Opens* is from the request until the first
charts are drawn in Chromium, when the log is read and while it is still being read; *samples* is
the table, sorted by reward; *search* the same of those that say a word, over texts of 200 tokens;
*sample* one with its tokens; *session* one of an agent with thirty calls; *new step* is from the
end of a step's commit until its point is in the chart. The slowest of three each. Goals: opens 2,
samples 0.5, search 1, session 0.5 and new step 2 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.schemas.events import Event
from tests.bench.hardware import hardware
from tests.browser import Browser
from tests.processes.web.made_run import MadeRun, served
from tests.processes.web.made_session import NUM_CALLS, session_events

DRAWN = "document.querySelectorAll('.plot .main-svg').length > 3"
POINTS = "document.querySelector('[data-chart] .plot').data[0].x.length"
LISTED = "location.search.startsWith('?text') && document.querySelector('tbody tr')"
UNREAD = "document.body.textContent.includes('not searched yet')"
CALLS = f"document.querySelectorAll('.calls > li').length === {NUM_CALLS}"
ANSWER_TOKENS = 200
TIMES = 3
GROUP = "999999"  # of the agent's session; no step has it


def measure(run: MadeRun, steps: int, browser: Browser) -> dict[str, float]:
    """All figures, seconds."""
    began_s = time.monotonic()
    with served({"run": run}, wait=False) as address:
        early_s = browser.open(f"{address}/r/run/", f"{DRAWN} && {POINTS} === {steps}")
        browser.wait("!document.getElementById('head').textContent.includes('records left')")
        read_s = time.monotonic() - began_s
        while browser.open(f"{address}/r/run/samples?text=x", LISTED) and browser.run(UNREAD):
            time.sleep(0.5)
        opens, tables, searches, news, tokens, sessions = [], [], [], [], [], []
        for n in range(TIMES):
            tables.append(
                browser.open(f"{address}/r/run/samples?sort=reward&page={n + 1}",
                             "document.querySelectorAll('tbody tr').length === 100")
            )  # fmt: skip
            words = ("8283", "nobody+says+this", "5051")[n]
            searches.append(browser.open(f"{address}/r/run/samples?text={words}", LISTED))
            tokens.append(
                browser.open(f"{address}/r/run/samples/{100 * n + 5}/1",
                             "document.querySelector('.tokens')")
            )  # fmt: skip
            sessions.append(browser.open(f"{address}/r/run/samples/{GROUP}/0", CALLS))
            opens.append(browser.open(f"{address}/r/run/", DRAWN))
            run.make_step(steps + n + 1)
            committed_s = time.monotonic()
            browser.wait(f"{POINTS} === {steps + n + 1}")
            news.append(time.monotonic() - committed_s)
    return {
        "opens_while_reading_s": round(early_s, 2),
        "read_s": round(read_s, 1),
        "opens_s": round(max(opens), 2),
        "samples_s": round(max(tables), 2),
        "search_s": round(max(searches), 2),
        "sample_s": round(max(tokens), 2),
        "session_s": round(max(sessions), 2),
        "new_step_s": round(max(news), 2),
    }


def agents_session() -> Iterator[Event]:
    """A session of thirty calls, of a group of its own."""
    for event in session_events():
        more = {"session_id": f"{GROUP}/0"} if hasattr(event, "session_id") else {}
        yield replace(event, group_id=GROUP, **more)  # type: ignore[call-arg]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="a step")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    run = MadeRun(args.samples, ANSWER_TOKENS)
    for number in range(1, args.steps + 1):
        run.make_step(number)
    run.write([*agents_session()])
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as browser,
    ):
        found = {"hardware": hardware(), "steps": args.steps, "samples": args.samples * args.steps,
                 **measure(run, args.steps, browser)}  # fmt: skip
    text = json.dumps(found, indent=2) + "\n"
    sys.stdout.write(text)
    if args.save:
        name = f"web_page-{date.today()}.json"
        (Path(__file__).parent / "results" / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
