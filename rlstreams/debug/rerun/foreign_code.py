"""Code of a recording that this machine's files do not hold: it runs only if its user says so.

A recording is passed on as data, and its steps are done again with the functions of the user's in
their claims (decision 0107): to open somebody's log must not run somebody's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.words.screen import visible
from rlstreams.workers.config.load import from_json
from rlstreams.workers.loop.agreement import code_digests, own_code
from rlstreams.workers.trainer.claim import read_ledger


def foreign_code(claim: TrainerStarted) -> dict[str, str]:
    """Texts of the claim's code, by `FIELD: PATH`, which the files that it names do not have."""
    if not claim.code:
        return {}
    here: Mapping[str, str] = {}
    with suppress(ConfigError):  # its files are not here
        here = own_code(from_json(claim.config))
    return {name: text for name, text in claim.code.items() if here.get(name) != text}


def source_lines(claim: TrainerStarted) -> Iterator[str]:
    """The texts of `foreign_code`, to be read before they run."""
    for name, text in foreign_code(claim).items():
        yield ""
        yield f"{visible(name)}, as the log has it and this machine's files do not:"
        yield from (f"    {visible(line)}".rstrip() for line in text.splitlines())


def refuse_foreign_code(bus: Bus, name: str, *, is_trusted: bool) -> None:
    """Refuse to do steps of a recording again with code that this machine's files do not hold.

    Args:
        name: of the recording, for the message.
        is_trusted: its user says that whoever wrote it may run programs here.

    Raises:
        ConfigError: there is such code; names the files.
    """
    if is_trusted:
        return
    found: dict[str, str] = {}
    for claim in read_ledger(bus, "trust").claims.values():
        found |= foreign_code(claim)
    if found:
        files = ", ".join(f"{k} (SHA-256 {v[:12]})" for k, v in code_digests(found).items())
        raise ConfigError(
            f"{name} holds code that the files of this machine do not, {files}, and its steps are "
            f"done again with it: read it (rlstreams config loss {name}), and add --trust-code if "
            "whoever wrote it may run programs here"
        )
