"""Delivery of a version to a server: the port, and the server's own way by a folder.

The fast way is our plugin in the server (`infra/server`), which receives straight into the server's
parameters. A server without it is given a Hugging Face folder that holds the version: it loads
that by its own means, at the speed that it has.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import Held, PauseMode
from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.adapters import ask_facts
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.megatron.files import FolderFiles
from rlstreams.workers.weights.channel import WeightChannel, WeightError
from rlstreams.workers.weights.link.mapping import each_expert, loader_name

PROBE_S = 20.0  # as `engine.silent_s`, which callers give
PLUGIN = "plugin"  # name of a delivery by our plugin
# Failures of reading a version beside `WeightError`: torch raises a RuntimeError if memory runs
# out, a network file system an OSError if it goes away.
_UNREADABLE = (RuntimeError, OSError, MemoryError)


class DeliveryError(WeightError):
    """A version did not reach a server.

    `touched`: its old weights may be damaged. `silent`: it did not report a result, and may hang.
    """

    def __init__(self, message: str, *, touched: bool, silent: bool = False) -> None:
        super().__init__(message)
        self.touched = touched
        self.silent = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryOrder:
    """One version for one server."""

    adapter: Adapter
    published: PolicyPublished
    channel: WeightChannel
    until_s: float  # monotonic

    @property
    def held(self) -> Held:
        """The version that the server holds afterwards."""
        return Held(self.published.policy_version, self.published.weight_hash)

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return max(0.1, self.until_s - time.monotonic())


class FolderDelivery:
    """Writes the version as a Hugging Face folder that the server can read, and has it load that.

    Server and worker must see the same file system.

    Args:
        model: the run's model folder.
        folder: where versions are written.
        probe_s: longest answer to a request that touches no weights.
    """

    def __init__(self, model: Path, folder: Path, *, probe_s: float = PROBE_S) -> None:
        self._model = model
        self._folder = folder
        self._probe_s = probe_s
        self._is_clean = False
        self._tensors: Collection[str] | None = None

    @property
    def name(self) -> str:
        """Name of the way that weights travel, for people."""
        return "folder"

    async def prepare(self, adapter: Adapter) -> None:
        """Set a server up that just became ready. Here: delete the versions that a killed
        predecessor left.

        Raises:
            ServerGoneError: it does not answer; it is not ready after all.
            ServerError: weights cannot reach it.
        """
        if not self._is_clean:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._is_clean = True

    async def probe(self, adapter: Adapter) -> None:
        """Check that the processes which would take a version still answer: a server whose pull
        hangs may answer `/health` all the same. Asked by a pause, in which a server with a broken
        pull is anyway: the engine behind a vLLM's front end has to answer it, that of an SGLang for
        its facts.

        Raises:
            ServerGoneError: they do not answer.
        """
        await ask_facts(adapter.http, self._probe_s)
        await adapter.pause(PauseMode.ABORT, keep_cache=False, deadline_s=self._probe_s)

    async def delivered(self, order: DeliveryOrder) -> int:
        """Run `deliver`; an unforeseen error becomes a DeliveryError of the worst kind: else the
        server would stay paused and seem to hold the old weights."""
        try:
            return await self.deliver(order)
        except DeliveryError:
            raise
        except ServerError as err:
            silent = isinstance(err, ServerGoneError)
            raise DeliveryError(str(err), touched=True, silent=silent) from err
        except Exception as err:
            url, version = order.adapter.http.url, order.published.policy_version
            message = f"server {url}: policy version {version}: {err!r}"
            raise DeliveryError(message, touched=True) from err

    async def deliver(self, order: DeliveryOrder) -> int:
        """Have the paused server take the version; returns the bytes that it took.

        The folder receives it first and its hash is checked: a broken pull touches no server.

        Raises:
            DeliveryError: it did not; `touched` if the old weights may be damaged.
            ServerError: the load failed; the old weights may be damaged.
        """
        target = self._folder / order.held.label
        try:
            num_bytes = await asyncio.to_thread(self._write, order, target)
            await order.adapter.load_folder(str(target.resolve()), order.left_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
        return num_bytes

    def _write(self, order: DeliveryOrder, target: Path) -> int:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        from rlstreams.workers.weights.layout import size_bytes

        with before_the_server(order):
            received = dict(order.channel.pull(order.published, order.left_s))
        try:
            weights = {
                loader_name(name, received, self._names()): tensor.contiguous()
                for name, tensor in each_expert(received.items(), received)
            }
            target.mkdir(parents=True, exist_ok=True)
            for file in self._model.iterdir():
                if file.suffix == ".json" and not file.name.endswith(".safetensors.index.json"):
                    link = target / file.name
                    link.unlink(missing_ok=True)
                    os.symlink(file.resolve(), link)
            save_file(weights, target / "model.safetensors", {"format": "pt"})
        except (*_UNREADABLE, SafetensorError) as err:
            version = order.published.policy_version
            raise DeliveryError(
                f"policy version {version} cannot be written to {target}: {err}", touched=False
            ) from err
        return size_bytes(weights)

    def _names(self) -> Collection[str]:
        """Names of the model folder's tensors; none where it has configuration alone."""
        if self._tensors is None:
            with suppress(EngineError):
                self._tensors = FolderFiles(self._model).names
        return self._tensors or ()


@contextmanager
def before_the_server(order: DeliveryOrder) -> Iterator[None]:
    """Guard of reading an order's weights: any failure becomes a DeliveryError, untouched."""
    try:
        yield
    except WeightError as err:
        raise DeliveryError(str(err), touched=False) from err
    except _UNREADABLE as err:
        version = order.published.policy_version
        message = f"policy version {version} cannot be read: {err!r}"
        raise DeliveryError(message, touched=False) from err
