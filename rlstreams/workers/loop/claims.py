"""The newest claim in `steps`, found from its end, without the history of a long run; and the
configuration of a claim."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlstreams.schemas.events import RunBranched, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.foreign import EventReader, near_end
from rlstreams.workers.loop.host import release, release_of

STEPS_PARTITION = Partition(STEPS.name, 0)
TAIL = 64  # offsets: a trainer's last heartbeat is not far from the end
CLAIM_S = 5.0  # to read a few records whose offsets are known


def claim_at(bus: Bus, offset: int, reader: str) -> TrainerStarted | None:
    """The claim at this offset; None: there is none, or `CLAIM_S` was not enough to read it.

    Args:
        reader: name of the reader, for the log.
    """
    if offset < 0:
        return None  # of an older trainer, which does not report its claim's place
    until_s = time.monotonic() + CLAIM_S
    with EventReader(bus, {STEPS_PARTITION: offset}, reader) as steps:
        while time.monotonic() < until_s:
            for record in steps.poll(1, 0.2):
                return record.event if isinstance(record.event, TrainerStarted) else None
    return None


def newest_claim(bus: Bus, reader: str) -> TrainerStarted | None:
    """The newest claim among the last `TAIL` records, or that they point to; None: neither."""
    start = near_end(bus, STEPS.name, TAIL)
    end = bus.ends(STEPS.name)[STEPS_PARTITION]
    claim: TrainerStarted | None = None
    beat: TrainerHeartbeat | None = None
    until_s = time.monotonic() + CLAIM_S
    with EventReader(bus, start, reader) as steps:
        while steps.positions()[STEPS_PARTITION] < end and time.monotonic() < until_s:
            for record in steps.poll(TAIL, 0.2):
                if isinstance(record.event, TrainerStarted):
                    claim = record.event
                elif isinstance(record.event, TrainerHeartbeat):
                    beat = record.event
    return claim if claim or not beat else claim_at(bus, beat.claim_offset, reader)


def claimed_config(claim: TrainerStarted | RunBranched) -> RunConfig:
    """The configuration of a claim, or of a branch's parent; raises as `config_by`."""
    return config_by(claim.config, claim.versions)


def config_by(text: str, versions: Mapping[str, str], origin: str = "") -> RunConfig:
    """A configuration that another release may have recorded.

    Args:
        versions: of its writer, as a claim has them.
        origin: as for `from_json`.

    Raises:
        ConfigError: a field or value that this release does not know; names it and both releases.
    """
    try:
        return from_json(text, origin) if origin else from_json(text)
    except ConfigError as err:
        raise ConfigError(
            f"{err}; rlstreams {release_of(versions) or 'of an unknown version'} recorded it, and "
            f"this is {release()}: take that release, or a newer one"
        ) from err
