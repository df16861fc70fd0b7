"""The page that all HTML of ours is: skeleton, style sheet, tables, figures; nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #656d76; --line: #d8dee4; --paper: #fff;
  --panel: #f6f8fa; --a: #0969da; --b: #9aa4af; --c: #bf8700; --d: #8250df; --e: #bc4c00;
  --bad: #cf222e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #8d96a0; --line: #30363d;
  --paper: #0d1117; --panel: #161b22; --a: #58a6ff; --b: #6e7681; --c: #d29922; --d: #bc8cff;
  --e: #f0883e; --bad: #ff7b72; --good: #3fb950; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1.8rem 0 .4rem; } a { color: var(--a); text-decoration: none; }
p { margin: .4rem 0; } .muted, .none, h1 small, figcaption small { color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; padding: 0; list-style: none; }
.figures li { background: var(--panel); border-radius: 8px; padding: .7rem .9rem; }
.figures b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--muted); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.5rem 2rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
figcaption small { font-weight: 400; display: block; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; padding: .4rem .6rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; } .wide { overflow-x: auto; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: var(--panel); border-radius: 8px; padding: .9rem; overflow-x: auto; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; }
.v0 { color: var(--a); } .v1 { color: var(--d); } .v2 { color: var(--c); }
.v3 { color: var(--good); } .v4 { color: var(--e); }
.right { color: var(--good); font-weight: 600; } .wrong { color: var(--bad); font-weight: 600; }
.verdict { border-left: 4px solid var(--good); background: var(--panel); padding: .6rem .9rem;
  border-radius: 4px; } .verdict.bad { border-color: var(--bad); }
"""
NUM_VERSION_COLORS = 5  # classes v0 to v4


def page(title: str, body: str, css: str = "") -> str:
    """A whole page; `body` and `css` are put in as they are."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'rlstreams: {title}')}</title><style>{CSS}{css}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def figures(shown: Iterable[tuple[str, str]]) -> str:
    """Tiles: (value, name) pairs."""
    items = "".join(f"<li><b>{escape(v)}</b><span>{escape(name)}</span></li>" for v, name in shown)
    return f'<ul class="figures">{items}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already.

    Args:
        numbers: columns that are aligned as numbers.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        inner = (
            f"<{tag}{' class=num' if n in numbers else ''}>{cell}</{tag}>"
            for n, cell in enumerate(cells)
        )
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{row(head, "th")}{body}</table></div>'


def number(value: float) -> str:
    """A value, short: `0.25`, `1,200`, `2e-04`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.3g}"
