"""The verifier `judge` against a server that speaks HTTP, goes away and comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError, Verifier

Answer = Callable[[dict[str, Any]], tuple[int, str]]  # of a request: status, text of the reply


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """Its URL; a status of 200 wraps the text in a chat completion, "cut:" ends it early."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert "/v1/chat/completions" == self.path
            status, text = answer(asked | {"key": self.headers["Authorization"]})
            if status == 200:
                why = "length" if text.startswith("cut:") else "stop"
                choice = {"message": {"content": text}, "finish_reason": why}
                text = json.dumps({"choices": [choice]})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def judged_by(address: str, **options: Any) -> Verifier:
    options = {"url": address, "model": "m", **options}
    return make_verifier(RewardSection(verifier="judge", options=options, timeout_s=5, processes=1))


def test_the_reward_is_what_the_judge_says_and_its_words_are_kept(tmp_path: Path) -> None:
    """By the template and the parser that are built in, and by one's own."""

    def answer(asked: dict[str, Any]) -> tuple[int, str]:
        (message,) = asked["messages"]
        assert ("m", 0.0, "Bearer k") == (asked["model"], asked["temperature"], asked["key"])
        if message["content"] == "2+3= 5 level 1":
            return 200, "grade: B"
        assert all(part in message["content"] for part in ("2+3=", "five", "\n5\n"))
        return 200, "It is 5, which is right.\n0.75"

    (tmp_path / "t.jinja").write_text("{{ prompt }} {{ completion }} level {{ metadata.level }}")
    (tmp_path / "p.py").write_text(
        "def grade(reply):\n    return {'reward': 'CBA'.index(reply[-1]), 'long': len(reply)}\n"
    )
    sample = AnswerToJudge("2+3=", "5", "five", {"level": 1})
    own = {"template_file": str(tmp_path / "t.jinja"), "parse": f"{tmp_path}/p.py:grade"}
    with server(answer) as url:
        with judged_by(url + "/v1", api_key="k") as one:
            said = Judgement(reward=0.75, note="It is 5, which is right.\n0.75")
            assert said == one.judge(sample)
        with judged_by(url, api_key="k", **own) as one:
            assert Judgement(reward=1, parts={"long": 8}, note="grade: B") == one.judge(sample)


def test_an_outage_delays_samples_and_costs_none() -> None:
    """Busy, broken and away are waited out; whoever waits is counted as not being sampled."""
    asked: list[str] = []
    all_asked, back = threading.Event(), threading.Event()

    def answer(_: dict[str, Any]) -> tuple[int, str]:
        asked.append("")
        if len(asked) == 20:
            all_asked.set()
        if not back.is_set():
            return (429, 503)[len(asked) % 2], "later"
        return 200, "1"

    async def all_of(one: Verifier) -> list[Judgement]:
        tasks = [asyncio.create_task(one.verify(AnswerToJudge("", "", "", {}))) for _ in range(20)]
        assert await asyncio.to_thread(all_asked.wait, 20)
        assert 20 == one.num_open
        back.set()
        return await asyncio.gather(*tasks)

    with server(answer) as url, judged_by(url) as one:
        assert [1.0] * 20 == [judged.reward for judged in asyncio.run(all_of(one))]
        assert 0 == one.num_open
    with (
        judged_by(url, patience_s=0.2) as one,
        pytest.raises(
            RewardError,
            match=r"judge http://127.* cannot be reached: .*asked again for 0\.2 s",
        ),
    ):
        one.judge(AnswerToJudge("", "", "", {}))


NO_NUMBER = "does not end with one number from 0 to 1"
NO_JUDGEMENTS = {
    "I cannot say.": (200, rf"{NO_NUMBER}: \.\.\.'I cannot say\.'"),
    "7": (200, NO_NUMBER),
    "Score: 0 (of 1)": (200, NO_NUMBER),
    "1%": (200, NO_NUMBER),
    "": (200, NO_NUMBER),
    "cut: 0.5": (200, "its reply was cut at max_tokens = 512"),
    "model `m` does not exist": (400, "answered 400: model `m` does not exist"),
}


def test_a_reply_that_is_no_judgement_costs_its_sample_at_once() -> None:
    """And the next one is judged by the same process."""
    text = ""
    with server(lambda _: (NO_JUDGEMENTS[text][0], text)) as url, judged_by(url) as one:
        for text, (_, message) in NO_JUDGEMENTS.items():  # noqa: B007 - the server answers it
            with pytest.raises(RewardError, match=message):
                one.judge(AnswerToJudge("", "", "", {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "reward.verifier 'judge' needs the option url"),
        ({"template_file": "none.jinja"}, "template_file: there is no file none.jinja"),
        ({"parse": "json"}, "parse must be `file.py:function`, got 'json'"),
        ({"patience_s": 0}, "patience_s must be above 0, got 0"),
        ({"tempo": 1}, "cannot be called with"),
    ],
)
def test_wrong_options_are_said_at_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judged_by("http://127.0.0.1:9", **options)
