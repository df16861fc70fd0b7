"""The report's style sheet: light and dark, no external resources."""

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #656d76; --line: #d8dee4; --paper: #fff;
  --panel: #f6f8fa; --a: #0969da; --b: #9aa4af; --c: #bf8700; --d: #8250df; --bad: #cf222e;
  --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #8d96a0; --line: #30363d;
  --paper: #0d1117; --panel: #161b22; --a: #58a6ff; --b: #6e7681; --c: #d29922; --d: #bc8cff;
  --bad: #ff7b72; --good: #3fb950; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 64rem; background: var(--paper);
  color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; } .muted, .none, figcaption small { color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; padding: 0; list-style: none; }
.figures li { background: var(--panel); border-radius: 8px; padding: .7rem .9rem; }
.figures b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.figures li:first-child { grid-column: span 2; }
.figures span { color: var(--muted); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.5rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
figcaption small { font-weight: 400; display: block; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { fill: var(--muted); font: 12px system-ui, sans-serif; }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--b); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .line.a { stroke: var(--a); } svg .line.b { stroke: var(--b); }
svg .line.c { stroke: var(--c); } svg .line.d { stroke: var(--d); }
svg .a { fill: var(--a); } svg .b { fill: var(--b); } svg .c { fill: var(--c); }
svg .d { fill: var(--d); } svg .line { fill: none !important; }
svg .mark path { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .mark text { fill: var(--bad); }
.legend { color: var(--muted); font-size: .85rem; }
.legend span span, .legend > span { margin-right: .9rem; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em !important; vertical-align: -.05em; }
.key.a { background: var(--a); } .key.b { background: var(--b); } .key.c { background: var(--c); }
.key.d { background: var(--d); } .key.kill { background: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; padding: .4rem .6rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; }
.wide { overflow-x: auto; } .wide td:first-child { white-space: nowrap; }
.on-narrow { display: none; }
@media (max-width: 40rem) { .on-wide { display: none; } .on-narrow { display: block; } }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: var(--panel); border-radius: 8px; padding: .9rem; overflow-x: auto; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; }
.v0 { color: var(--a); } .v1 { color: var(--d); } .v2 { color: var(--c); }
.v3 { color: var(--ink); }
.right { color: var(--good); font-weight: 600; } .wrong { color: var(--bad); font-weight: 600; }
.verdict { border-left: 4px solid var(--good); background: var(--panel); padding: .6rem .9rem;
  border-radius: 4px; } .verdict.bad { border-color: var(--bad); }
"""
