"""One page without anything to load: health, workers and minutes, asked anew every two seconds."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rlstreams monitor</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; }
h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin-bottom: 0; }
.bad { color: #b00020; } .good { color: #0a6b2d; }
</style>
<h1 id="title">rlstreams monitor</h1><div id="health"></div>
<h2>Workers</h2><table id="workers"></table>
<h2>Minutes</h2><table id="minutes"></table>
<p><a href="health">health</a> <a href="windows">windows</a> <a href="workers">workers</a></p>
<script>
const get = path => fetch(path).then(answer => answer.json());
const told = counts => Object.entries(counts).map(([k, v]) => k + ": " + v).join(", ");
const sum = counts => Object.values(counts).reduce((a, b) => a + b, 0);
function fill(id, head, rows) {
  const table = document.getElementById(id);
  table.replaceChildren();
  for (const row of [head, ...rows]) {
    const tr = table.insertRow();
    for (const value of row) {
      const cell = document.createElement(row === head ? "th" : "td");
      cell.textContent = value ?? "";
      tr.append(cell);
    }
  }
}
async function show() {
  try {
    const [h, workers, windows] = await Promise.all(["health", "workers", "windows"].map(get));
    document.getElementById("title").textContent = "run " + h.run + ", step " + h.step +
      " of " + h.step_target + ", " + h.state;
    const health = document.getElementById("health");
    health.className = h.ok ? "good" : "bad";
    health.textContent = h.ok ? "well" : h.problems.join("; ");
    fill("workers", ["worker", "state", "version", "restarts", "last report"],
      workers.workers.map(w => [w.worker, w.state + " " + w.detail, w.policy_version, w.restarts,
        w.last_report]));
    fill("minutes", ["from", "steps", "tokens", "tokens/s", "reward", "staleness, tokens",
      "dropped", "dead letters", "restarts"],
      windows["1m"].toReversed().map(m => [m.start, m.steps, m.tokens, m.tokens_per_s,
        m.reward_mean, told(m.staleness_tokens), told(m.dropped_groups),
        sum(Object.values(m.dead_letters).map(sum)), told(m.restarts)]));
  } catch (error) {
    const health = document.getElementById("health");
    health.className = "bad";
    health.textContent = "the monitor does not answer: " + error;
  }
}
show();
setInterval(show, 2000);
</script>
"""
