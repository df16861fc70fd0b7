"""The way of versions from the trainer to the other roles: server, channel, store, secret."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.trainer import MEGATRON
from rlstreams.workers.loop.context import Context

if TYPE_CHECKING:
    from rlstreams.workers.weights.channel import WeightChannel, WeightServer
    from rlstreams.workers.weights.store.writer import StoreWriter

WEIGHTS_FOLDER = "weights"
PULLED_FOLDER = "pulled"  # files for model servers, of versions that came from a store
SECRET_FILE = "weights.secret"


def weight_store(context: Context) -> StoreWriter | None:
    """The trainer's writer of the store; None: the run has no store.

    Raises:
        WeightError: its URL cannot be opened.
    """
    section = context.config.store
    if not (address := context.config.store_address):
        return None
    from rlstreams.workers.weights.store.place import place_of
    from rlstreams.workers.weights.store.writer import StoreWriter

    return StoreWriter(
        place_of(address),
        context.config.run.id,
        context.log,
        anchor_every=section.anchor_every,
        keep=section.keep,
        deadline_s=section.deadline_s,
    )


def weight_server(context: Context) -> WeightServer:
    """The trainer's end of the weight channel."""
    weights = context.config.weights
    if weights.channel == "store":
        from rlstreams.workers.weights.store.channel import StoreWeightServer

        return StoreWeightServer()
    if weights.channel == "file":
        from rlstreams.workers.weights.file import FileWeightServer

        return FileWeightServer(context.folder / WEIGHTS_FOLDER, keep=weights.versions_served)
    from rlstreams.workers.config.checks import check_address
    from rlstreams.workers.weights.collective import CollectiveWeightServer
    from rlstreams.workers.weights.sender import SenderDeadlines

    check_address("weights.host", weights.host)
    # Room that shards leave on rank 0's GPU is not room for whole versions; on a GPU that is
    # shared nothing may stay.
    section = context.config.trainer
    is_cut = section.ranks > 1 or section.backend == MEGATRON
    is_pinned = is_cut or context.config.shared_device("trainer")
    return CollectiveWeightServer(
        weights.channel,
        host=weights.host,
        secret=run_secret(context),
        log=context.log,
        limits=SenderDeadlines(stall_s=weights.stall_deadline_s),
        place="pinned" if is_pinned and weights.snapshot == "auto" else weights.snapshot,
    )


def weight_channel(context: Context) -> WeightChannel:
    """A worker's end of the weight channel."""
    channel = context.config.weights.channel
    if channel == "file":
        from rlstreams.workers.weights.file import FileWeightChannel

        return FileWeightChannel()
    if channel == "store":
        from rlstreams.workers.weights.store.channel import StoreWeightChannel

        config = context.config
        return StoreWeightChannel(config.run.id, context.folder / PULLED_FOLDER / context.worker)
    from rlstreams.workers.weights.collective import CollectiveWeightChannel

    return CollectiveWeightChannel(channel, run_secret(context))


def run_secret(context: Context) -> str:
    """The run's secret: as configured, or made once in the run's folder, for its owner alone.

    Raises:
        WeightError: the file is empty.
    """
    from rlstreams.workers.weights.channel import WeightError

    if configured := resolve_secret(context.config.weights.secret, "weights.secret"):
        return configured
    path = context.folder / SECRET_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, and only one, even if another process makes it now.
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        temporary.touch(0o600, exist_ok=False)
        temporary.write_text(secrets.token_hex(32), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
        temporary.unlink()
    if secret := path.read_text(encoding="utf-8").strip():
        return secret
    raise WeightError(f"{path} is empty; remove it, or name a secret in weights.secret")
