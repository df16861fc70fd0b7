"""Style and script of the page: beside the report's style sheet, no external resources.

Colours of tokens are classes that the chosen switch makes visible, so the page works without its
script too; the script adds what one token's numbers are.
"""

CSS = """
:root { --low: #0969da; --high: #cf222e; --hot: #bf8700; --v0: #0969da; --v1: #8250df;
  --v2: #bf8700; --v3: #1a7f37; --v4: #bc4c00; }
@media (prefers-color-scheme: dark) { :root { --low: #58a6ff; --high: #ff7b72; --hot: #d29922;
  --v0: #58a6ff; --v1: #bc8cff; --v2: #d29922; --v3: #3fb950; --v4: #f0883e; } }
body { max-width: 72rem; }
a { color: var(--a); text-decoration: none; } a:hover { text-decoration: underline; }
h1 small { font-weight: 400; color: var(--muted); font-size: 1rem; }
h3 { font-size: .95rem; margin: 1.8rem 0 .4rem; }
details.sample { border-top: 1px solid var(--line); padding: 1rem 0; }
details.sample > summary { cursor: pointer; font-size: 1.25rem; font-weight: 600; }
summary .outcome { font-size: .8rem; font-weight: 600; padding: .12rem .5rem; border-radius: 99px;
  margin-left: .5rem; vertical-align: .15em; color: var(--c); background: color-mix(in srgb,
  currentColor 14%, transparent); }
summary .outcome.trained, summary .outcome.evaluated { color: var(--good); }
summary .outcome.dropped, summary .outcome.dead-lettered, summary .outcome.left-out {
  color: var(--bad); }
summary code { font-weight: 400; font-size: .85rem; color: var(--muted); margin-left: .5rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .5rem;
  margin: .8rem 0; }
.figures li { padding: .5rem .7rem; } .figures b { font-size: 1.1rem; white-space: nowrap; }
.bar { position: sticky; top: 0; z-index: 2; background: var(--paper); padding: .5rem 0;
  display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; }
.switch { display: inline-flex; border: 1px solid var(--line); border-radius: 8px;
  overflow: hidden; }
.switch label { padding: .25rem .75rem; cursor: pointer; font-size: .88rem; color: var(--muted);
  border-left: 1px solid var(--line); }
.switch label:first-of-type { border-left: 0; }
.switch input { position: absolute; opacity: 0; pointer-events: none; }
.switch input:checked + label { background: var(--a); color: var(--paper); }
.switch input:focus-visible + label { outline: 2px solid var(--ink); outline-offset: -3px; }
.keys { color: var(--muted); font-size: .82rem; display: none; align-items: center; gap: .25rem; }
.keys i { font-style: normal; padding: .05rem .4rem; border-radius: 4px; color: var(--ink);
  background: color-mix(in srgb, var(--t) var(--p, 26%), transparent); }
main:has(#by-author:checked) .keys.author, main:has(#by-version:checked) .keys.version,
main:has(#by-difference:checked) .keys.difference, main:has(#by-surprise:checked) .keys.surprise,
main:has(#by-entropy:checked) .keys.entropy { display: inline-flex; flex-wrap: wrap; }
.text { background: var(--panel); border-radius: 8px; padding: .8rem 1rem; overflow-wrap: anywhere;
  white-space: pre-wrap; font: 15px/1.9 ui-monospace, monospace; max-height: 32rem;
  overflow-y: auto; }
.text span { border-radius: 3px; padding: .12em 0; cursor: default; --p: 26%;
  background: color-mix(in srgb, var(--t, transparent) var(--p), transparent);
  box-shadow: inset -1px 0 0 var(--panel); }
.text span { color: var(--ink); } .text span.o { color: var(--muted); }
.text span.ae { border-bottom: 1px dotted var(--v1); }
.text span:hover, .text span.on { outline: 2px solid var(--ink); }
main:has(#by-author:checked) .ap { --t: var(--b); } main:has(#by-author:checked) .ao {
  --t: var(--v0); } main:has(#by-author:checked) .ae { --t: var(--v1); }
__VERSIONS__
__LEVELS__
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: 8px; padding: .5rem .7rem; font-size: .82rem;
  box-shadow: 0 6px 24px rgb(0 0 0 / 25%); max-width: 26rem; display: none; }
#tip b { font: 600 14px ui-monospace, monospace; white-space: pre-wrap; }
#tip table { width: auto; margin-top: .2rem; font-size: .82rem; }
#tip td { border: 0; padding: .05rem .9rem .05rem 0; }
#tip td + td { text-align: right; padding-right: 0; font-variant-numeric: tabular-nums; }
.strip { display: block; width: 100%; min-width: 8rem; height: 16px; }
.text + .strip { height: 10px; margin: .4rem 0; }
.strip rect { fill: color-mix(in srgb, var(--t, var(--b)) var(--p, 22%), transparent); }
.strip .l { --t: var(--low); } .strip .h { --t: var(--high); }
.way { overflow-x: auto; } .way svg { min-width: 46rem; }
svg .lane { fill: var(--panel); } svg .wait { stroke: var(--b); stroke-width: 1.5;
  stroke-dasharray: 3 3; fill: none; } svg .work { fill: var(--a); } svg .work.bad {
  fill: var(--bad); } svg .weights { fill: var(--d); } svg .role { fill: var(--ink);
  font-weight: 600; } svg text.in { fill: var(--ink); }
tr.weights td { color: var(--muted); } td.time, td.place, td.short, td.num { white-space: nowrap; }
td.time, td.place { white-space: nowrap;
  font-variant-numeric: tabular-nums; } td.place code, td.hash code { color: var(--muted);
  font-size: 12px; } tr.self td { font-weight: 600; } tbody tr.go { cursor: pointer; }
tbody tr.go:hover td { background: var(--panel); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 0 2.5rem; } .pair > div { min-width: 0; }
svg .cell { fill: var(--a); }
td.said { max-width: 17rem; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
table.facts td:first-child { white-space: nowrap; color: var(--muted); }
"""

_PERCENT = (0, 12, 28, 48, 74)  # of a level's colour in the background
NUM_VERSION_COLORS = 5

_VERSIONS = "\n".join(
    f"main:has(#by-version:checked) .v{n} {{ --t: var(--v{n}); }}"
    for n in range(NUM_VERSION_COLORS)
)


def _levels() -> str:
    rules = []
    for name, letter, colors in (
        ("difference", "d", (("l", "low"), ("h", "high"))),
        ("surprise", "s", (("", "hot"),)),
        ("entropy", "e", (("", "v1"),)),
    ):
        for side, color in colors:
            for level, percent in enumerate(_PERCENT):
                if level:
                    rules.append(
                        f"main:has(#by-{name}:checked) .{letter}{side}{level} "
                        f"{{ --t: var(--{color}); --p: {percent}%; }}"
                    )
    rules += [f".p{level} {{ --p: {percent}%; }}" for level, percent in enumerate(_PERCENT)]
    return "\n".join(rules)


CSS = CSS.replace("__VERSIONS__", _VERSIONS).replace("__LEVELS__", _levels())

SCRIPT = """
(() => {
  const tip = document.getElementById('tip');
  const data = {};
  const of = id => data[id] ??= JSON.parse(document.getElementById('data-' + id).textContent);
  const row = (name, value) => {
    if (value === null || value === undefined || value === '') return;
    const line = tip.querySelector('table').insertRow();
    line.insertCell().textContent = name;
    line.insertCell().textContent = value;
  };
  const signed = value => (value > 0 ? '+' : '') + value;
  const fill = span => {
    const detail = of(span.parentElement.dataset.of), i = +span.dataset.i;
    const segment = detail.segments[detail.segment[i]];
    const behavior = detail.behavior[i], proximal = detail.proximal[i];
    tip.innerHTML = '<b></b><table></table>';
    tip.querySelector('b').textContent = JSON.stringify(span.dataset.w ?? span.textContent);
    row('token', i + ' (id ' + detail.ids[i] + ')');
    row('author', segment.author);
    row('version', segment.version);
    row('weights', segment.weights);
    row('behavior log-prob', behavior);
    row('proximal log-prob', proximal);
    if (behavior !== null && proximal !== null) {
      row('difference', signed(+(proximal - behavior).toPrecision(3)));
      row('ratio', +Math.exp(proximal - behavior).toPrecision(5));
    }
    row('reference log-prob', detail.reference[i]);
    row('entropy', detail.entropy[i]);
    (detail.experts?.[i] ?? []).forEach((ids, layer) => row('experts, layer ' + layer,
      ids.join(' ')));
    tip.style.display = 'block';
  };
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + 'px';
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + 'px';
  };
  document.addEventListener('mouseover', event => {
    const span = event.target.closest('.text span');
    if (!span) { tip.style.display = 'none'; return; }
    fill(span);
    place(event.clientX, event.clientY);
  });
  document.addEventListener('click', event => {
    const line = event.target.closest('tr.go'), mark = event.target.closest('a[data-token]');
    if (line) open(line.dataset.to);
    if (mark) {
      const span = document.querySelector(
        `.text[data-of="${mark.dataset.detail}"] span[data-i="${mark.dataset.token}"]`);
      document.querySelectorAll('.text .on').forEach(on => on.classList.remove('on'));
      span.classList.add('on');
      span.scrollIntoView({ block: 'nearest' });
      const box = span.getBoundingClientRect();
      fill(span);
      place(box.left, box.bottom);
      event.preventDefault();
    }
  });
  const open = id => {
    const detail = document.getElementById(id);
    if (detail) { detail.open = true; detail.scrollIntoView({ behavior: 'smooth' }); }
  };
  const follow = () => location.hash && open(decodeURIComponent(location.hash.slice(1)));
  addEventListener('hashchange', follow);
  follow();
  const switches = [...document.querySelectorAll('.switch input')];
  addEventListener('keydown', event => {
    const chosen = switches[+event.key - 1];
    if (chosen && !event.ctrlKey && !event.metaKey && !event.altKey) chosen.checked = true;
  });
})();
"""
