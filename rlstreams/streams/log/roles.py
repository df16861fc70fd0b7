"""The roles, in the order in which they drain: no role waits for work of one that has left.

A new role also needs a folder in `workers/` with its `worker.py`, its maker in `MAKERS`
(`workers/bootstrap/parts.py`), its name among the writers and readers of topics
(`streams/log/topics.py`), the settings that it computes with in `COMPUTED_WITH`
(`workers/loop/agreement.py`), and its name in `Kill.role` (`workers/config/operation.py`). A test
(`tests/unit/roles/test_registered.py`) names what was forgotten. `up` starts as many processes as
`workers` of its section says, else one.
"""

from __future__ import annotations

ROLES = ("prompts", "rollout", "server", "logprob", "trainer")
STAGES = ("prompts", "rollout", "logprob", "trainer")  # that a sample passes through
