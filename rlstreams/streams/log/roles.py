"""The roles, in the order in which they drain: no role waits for work of one that has left.

A new role also needs a folder in `workers/` with its `worker.py`, its maker in
`workers/bootstrap/parts.py`, and its topics in `streams/log/topics.py`.
"""

from __future__ import annotations

ROLES = ("prompts", "rollout", "server", "logprob", "trainer")
STAGES = ("prompts", "rollout", "logprob", "trainer")  # that a sample passes through
