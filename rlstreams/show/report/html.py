"""HTML of report and live page: one set of templates, which escape all that they print.

Text of the log may be anything: control characters and those that turn the direction of text are
spelled out, and HTML is escaped, before a template prints it.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlstreams.streams.log.text import utc_text
from rlstreams.words.house import MEANING
from rlstreams.words.screen import clock_text, number, visible

STATIC = Path(str(files("rlstreams.show.report") / "static"))
NOTHING = "-"
# Characters that turn the direction of text, and surrogates, which UTF-8 cannot encode.
_ODD = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\ud800-\udfff]")


def plain(value: object) -> object:
    """Printable form of a value: text without control characters, `-` for None."""
    if value is None:
        return NOTHING
    if isinstance(value, str) and not isinstance(value, Markup):
        return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", visible(value))
    return value


def short(value: float | None) -> str:
    """A number, short; `-` for None."""
    return NOTHING if value is None else number(value)


def clock_time(at_ms: int) -> str:
    """Date and time, UTC."""
    return utc_text(at_ms) if at_ms else NOTHING


def as_json(value: object) -> str:
    """JSON that may stand in a `script`; of a dataclass its fields."""
    given = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return json.dumps(given, separators=(",", ":")).replace("<", "\\u003c")


@cache
def environment() -> Environment:
    """The environment of all templates."""
    found = Environment(
        loader=PackageLoader("rlstreams.show.report"),
        autoescape=True,
        finalize=plain,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.filters |= {"number": short, "time": clock_time, "clock": clock_text, "as_json": as_json}
    found.globals |= {"unwanted_style": unwanted_style, "meaning": MEANING}
    return found


def render(template: str, **values: object) -> str:
    """A page."""
    given = {"inline": None, "runs": [], "run": "", "view": "", "views": (), "all_runs": (),
             "has_charts": False, **values}  # fmt: skip
    return environment().get_template(template).render(given)


def plotter() -> bytes:
    """The plotting library: one script, of the package `plotly` (MIT)."""
    return (Path(str(files("plotly"))) / "package_data" / "plotly.min.js").read_bytes()


@cache
def unwanted_style() -> str:
    """The id under which the plotter adds a style sheet for maps, unless an element has it.

    No chart of ours is a map, and the page's policy refuses what is written into the page. Empty:
    this release of the plotter adds none.
    """
    found = re.search(rb'getElementById\("([0-9a-f]{32,})"\)', plotter())
    return found[1].decode() if found else ""


def inlined(data: Mapping[str, Any]) -> dict[str, Markup]:
    """Parts that are embedded in a self-contained page: style sheet, scripts and numbers."""
    packed = base64.b64encode(gzip.compress(plotter(), 6, mtime=0)).decode()
    return {
        "css": Markup((STATIC / "page.css").read_text("utf-8")),
        "js": Markup((STATIC / "page.js").read_text("utf-8")),
        "plotter": Markup(packed),
        "data": Markup(as_json(dict(data))),
    }
