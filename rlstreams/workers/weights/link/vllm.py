"""vLLM: a weight-transfer engine named `rlstreams`, registered by a `vllm.general_plugins` entry.

Source of the interface: `vllm/distributed/weight_transfer/base.py` of 0.25.1 and 0.32.0. The
engine's own route for updates calls `update_weights` in every worker process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm import __version__
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from . import vllm_records
from .model_target import Loading
from .orders import ServerRank

NAME = "rlstreams"


def register() -> None:
    """Register the engine; vLLM calls it in each of its processes, in some more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, RlstreamsEngine)
    try:
        vllm_records.install()
    except (ImportError, AttributeError) as err:  # then `NAME_LABEL` is refused
        print(f"rlstreams: this vLLM keeps no records of requests: {err!r}", file=sys.stderr)  # noqa: T201


@dataclass
class InitInfo(WeightTransferInitInfo):
    """No fields: orders carry everything."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One order."""

    order: str = ""


class RlstreamsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights by order into the worker's model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: an order that goes through the loader prepares it itself."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Obey; the base class would ask for an accelerator, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Obey; the report carries the result."""
        self._server().obey(update_info.order)

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._server().close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:  # noqa: ANN401
        """Refuse: our trainer sends by its weight server."""
        raise NotImplementedError("weights are sent by rlstreams' weight server")

    def _server(self) -> ServerRank:
        if not hasattr(self, "_made"):
            parallel = self.parallel_config
            self._made = ServerRank(
                self.model,
                self.device,
                engine=f"vllm {__version__}",
                rank=parallel.rank,
                ranks=parallel.tensor_parallel_size,
                loading=Loading(before=self._before_load, after=self._after_load),
            )
        return self._made

    def _before_load(self) -> None:
        """Begin a layerwise reload, as vLLM's own engines do; see `_unpack_experts`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._unpack_experts()
        initialize_layerwise_reload(self.model)

    def _after_load(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def _unpack_experts(self) -> None:
        """On a CPU vLLM packs experts on the first load only, and a reload would copy plain weights
        over packed ones: without its kernel a layer packs again. Recognised by attribute: 0.25 and
        0.32 have the class in different modules."""
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                setattr(method, "moe_kernel", None)  # noqa: B010  (a class that is not ours)
