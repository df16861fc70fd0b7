"""The adapter of each kind of server."""

from __future__ import annotations

from collections.abc import Mapping

from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.sglang import SglangAdapter
from rlstreams.workers.engines.served.vllm import VllmAdapter

ADAPTERS: Mapping[Kind, type[Adapter]] = {Kind.VLLM: VllmAdapter, Kind.SGLANG: SglangAdapter}
