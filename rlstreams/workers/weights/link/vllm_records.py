# ruff: noqa: ANN401  (objects of vLLM's engine core)
"""Records of running requests, kept in vLLM's engine core: log-probs and version of each token.

An answer carries its record in `kv_transfer_params`, so it comes in one piece and gives the version
of each token; vLLM before 0.32 does not. The API process makes no log-prob objects, which bound it
(decision 0022).

A token is noted when the engine core takes it from a finished step, under the label in force then.
Labels change only in a completed pause, with no step in flight, so it is the label of the weights
that sampled it; a request that is preempted and computed anew samples no token anew. From the first
call of a weight update on the label is empty until `NAME_LABEL` sets the next one: no token is
noted under weights that our worker has not confirmed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeAlias

Hook: TypeAlias = Callable[..., Any]
KEY = "rlstreams"  # in `extra_args` of a request, and in `kv_transfer_params` of its answer
NAME_LABEL = "rlstreams_label"  # method of `/collective_rpc`: sets the label, if one is given


@dataclass(slots=True)
class RequestRecord:
    """Record of one request."""

    request: Any  # vLLM's, for its count of preemptions
    logprobs: bytearray = field(default_factory=bytearray)  # float32, little-endian
    num_tokens: int = 0
    starts: list[tuple[str, int]] = field(default_factory=list)  # (label, its first token)

    def note(self, num_new: int, rows: Any, label: str) -> None:
        """Add new tokens, and log-probs [num_new, 1 or more], the sampled token's first."""
        if not num_new:
            return
        if not self.starts or self.starts[-1][0] != label:
            self.starts.append((label, self.num_tokens))
        self.num_tokens += num_new
        if rows is not None:  # else the missing log-probs show in the answer
            self.logprobs += rows.logprobs[:, :1].astype("<f4").tobytes()

    def answer(self) -> dict[str, Any]:
        """The record in the form of the answer."""
        ends = [*(start for _, start in self.starts), self.num_tokens][1:]  # none before a token
        return {
            "logprobs": base64.b64encode(self.logprobs).decode("ascii"),
            "weight_versions": [
                {"version": label, "start": start, "end": end}
                for (label, start), end in zip(self.starts, ends, strict=True)
            ],
            "num_preemptions": int(getattr(self.request, "num_preemptions", 0)),
        }


class RequestRecords:
    """Records of one engine core; belongs to its thread."""

    def __init__(self) -> None:
        self.label = ""
        self._running: dict[str, RequestRecord] = {}

    def begin(self, request: Any) -> None:
        """Record a request that asks for it, with log-probs, whatever its client receives."""
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(KEY):
            params.logprobs = 0
            self._running.setdefault(request.request_id, RequestRecord(request))

    def note(self, outputs: dict[int, Any]) -> None:
        """Take a step's outputs: log-probs stay here until the answer is whole."""
        for batch in outputs.values():
            for output in batch.outputs:
                record = self._running.get(output.request_id)
                if record is not None:
                    rows, output.new_logprobs = output.new_logprobs, None
                    record.note(len(output.new_token_ids), rows, self.label)
                    if output.finish_reason is not None:
                        output.kv_transfer_params = self.end(output.request_id)

    def end(self, request_id: str) -> dict[str, Any] | None:
        """The record of a request that ended, for its answer; None if it asked for none."""
        record = self._running.pop(request_id, None)
        return None if record is None else {KEY: record.answer()}


_records = RequestRecords()  # one engine core a process


def install() -> None:
    """Hook into the classes of the engine core; once a process.

    Raises:
        AttributeError, ImportError: a vLLM of another structure; it then keeps no records.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if getattr(Scheduler, KEY, False):
        return

    def add_request(original: Hook, self: Any, request: Any) -> Any:
        _records.begin(request)
        return original(self, request)

    def update_from_output(original: Hook, self: Any, *args: Any) -> Any:
        outputs = original(self, *args)
        _records.note(outputs)
        return outputs

    def abort_requests(original: Hook, self: Any, request_ids: list[str]) -> Any:
        for request_id in request_ids:
            _records.end(request_id)
        return original(self, request_ids)

    def send(_: Hook, self: Any, request_ids: list[str], client_index: int, reason: Any) -> None:
        outputs = [
            EngineCoreOutput(one, [], finish_reason=reason, kv_transfer_params=_records.end(one))
            for one in request_ids
        ]
        ended = EngineCoreOutputs(finished_requests=request_ids, outputs=outputs)
        self.output_queue.put_nowait((client_index, ended))

    def collective_rpc(original: Hook, self: Any, method: Any, *rest: Any, **named: Any) -> Any:
        args = named.get("args", rest[1] if len(rest) > 1 else ())
        if method == NAME_LABEL:
            _records.label = str(args[0]) if args else _records.label
            return [True]
        if isinstance(method, str) and "weight" in method:
            _records.label = ""
        return original(self, method, *rest, **named)

    hooks: list[tuple[Any, str, Hook]] = [
        (Scheduler, "add_request", add_request),
        (Scheduler, "update_from_output", update_from_output),
        (EngineCore, "abort_requests", abort_requests),
        (EngineCoreProc, "_send_finish_outputs_to_client", send),
        (EngineCore, "collective_rpc", collective_rpc),
    ]
    found = [(owner, name, getattr(owner, name), hook) for owner, name, hook in hooks]
    for owner, name, original, hook in found:
        setattr(owner, name, _hooked(original, hook))
    setattr(Scheduler, KEY, True)


def _hooked(original: Hook, hook: Hook) -> Hook:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return called
