"""Our own words, each with a sentence that explains it on a screen: infra/docs/glossary.md."""

from __future__ import annotations

from collections.abc import Mapping

MEANING: Mapping[str, str] = {
    "claim": "a trainer claims a run when it starts: it writes to the log that from here on it "
    "alone makes the steps, and with which configuration",
    "ledger": "the ledger is the topic steps: which steps were made, of which samples, and which "
    "groups were dropped",
    "void": "an event is void if a trainer wrote it after another one had claimed the run: every "
    "reader skips it",
}
