"""Which calls are beside the task, as the configuration knows them: recorded, never learnt from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlstreams.workers.gateway.canonical import plain
from rlstreams.workers.gateway.port import CallRequest


class Auxiliary:
    """Tells them by what they ask for; a client that can say it itself does (`is_trained`)."""

    def __init__(self, models: Sequence[str] = (), prompts: Sequence[str] = ()) -> None:
        """
        Args:
            models: regular expressions, of names of models.
            prompts: regular expressions, of texts of system messages.
        """
        self._models = tuple(map(re.compile, models))
        self._prompts = tuple(map(re.compile, prompts))

    def has(self, request: CallRequest) -> bool:
        """Whether the request makes one.

        Raises:
            CallRefusedError: 400; as `plain`.
        """
        if not request.is_trained or any(one.search(request.model) for one in self._models):
            return True
        if not self._prompts:
            return False
        texts = [m["content"] for m in map(plain, request.messages) if m["role"] == "system"]
        return any(one.search(text) for one in self._prompts for text in texts)
