"""What a server does with an order: it reports, whatever happens, and what it may have broken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlstreams.workers.weights.layout import weight_hash
from rlstreams.workers.weights.link import PROTOCOL
from rlstreams.workers.weights.link.mapping import make_plan
from rlstreams.workers.weights.link.model_target import Loading, ModelTarget
from rlstreams.workers.weights.link.orders import ServerRank
from rlstreams.workers.weights.link.pieces import Piece
from rlstreams.workers.weights.link.target import Row, rows_of
from rlstreams.workers.weights.report_listener import ReportListener

SENT = {"bias": torch.ones(2), "weight": torch.arange(6, dtype=torch.float32).view(2, 3)}


class Model(torch.nn.Linear):
    """A server's model: its parameters, and its own loader."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.error: Exception | None = None

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.error is not None:
            raise self.error
        with torch.no_grad():
            for name, tensor in tensors:
                self.get_parameter(name).copy_(tensor)


class Recorder(torch.nn.Module):
    """A model without parameters, whose loader keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.given |= {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "v.safetensors"
    save_file(SENT, path)
    return path


def order(file: Path, **changes: object) -> dict[str, object]:
    """Of one file; `changes` are what is wrong with it."""
    return {
        "rlstreams": PROTOCOL,
        "order": "o1",
        "kind": "receive",
        "mode": "in_place",
        "channel": "file",
        "address": str(file),
        "receiver": "0",
        "key": "",
        "epoch": 1,
        "policy_version": 3,
        "weight_hash": weight_hash(SENT),
        "layout": "",
        "deadline_s": 60.0,
    } | changes


def serving(model: torch.nn.Module, **more: Any) -> ServerRank:
    return ServerRank(model, torch.device("cpu"), engine="test 1", loading=Loading(**more))


def obey(server: ServerRank, what: Mapping[str, object]) -> dict[str, Any]:
    return server.obey(json.dumps(what))


@pytest.mark.parametrize("mode", ["in_place", "checkpoint", "auto"])
def test_a_version_gets_in_either_way(file: Path, mode: str) -> None:
    """Over the parameters, or through the model's own loader."""
    model = Model()
    report = obey(serving(model), order(file, mode=mode))
    assert (True, False, 3, 32) == tuple(
        report[name] for name in ("ok", "touched", "policy_version", "num_bytes")
    )
    assert all(torch.equal(SENT[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no JSON", "an order that is no JSON"),
        ("[" * 100_000, "an order that is no JSON"),
        ("[]", "no order of version"),
        (json.dumps({"rlstreams": PROTOCOL + 1}), "no order of version"),
        (json.dumps({"rlstreams": PROTOCOL, "kind": "dance"}), "kind is 'dance'"),
        (json.dumps({"rlstreams": PROTOCOL, "kind": "receive", "mode": 3}), "mode is 3"),
    ],
)
def test_what_is_no_order_is_refused(text: str, error: str) -> None:
    """By report: an exception would end the whole server."""
    report = serving(Model()).obey(text)
    assert (False, "refused", False) == (report["ok"], report["kind"], report["touched"])
    assert error in report["error"]


@pytest.mark.parametrize("missing", ["deadline_s", "channel", "address", "policy_version"])
def test_an_order_without_a_field_is_answered_with_its_name(file: Path, missing: str) -> None:
    """As a failure of the server's, and nothing raises."""
    what = order(file)
    del what[missing]
    report = obey(serving(Model()), what)
    assert (False, "server") == (report["ok"], report["kind"])
    assert missing in report["error"]


@pytest.mark.parametrize(
    ("model", "changes", "kind", "error"),
    [
        (Model(), {"address": "/none"}, "gone", "no longer served"),
        (torch.nn.Linear(4, 2), {}, "layout", "weight"),
        (Model(), {"deadline_s": -1.0}, "deadline", "was not read in time"),
        (
            Model(),
            {"channel": "gloo", "address": "127.0.0.1:1", "key": "00", "receiver": "r"},
            "link",
            "127.0.0.1:1",
        ),
    ],
)
def test_what_cannot_be_received_leaves_the_old_weights(
    file: Path, model: torch.nn.Module, changes: dict[str, object], kind: str, error: str
) -> None:
    """The server holds what it held, and says so: a file that is gone, another layout, named with
    both sides, a deadline that passed while the file was read, a trainer that is gone."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = obey(serving(model), order(file, **changes))
    assert (False, kind, False) == (report["ok"], report["kind"], report["touched"])
    assert error in report["error"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_loader_that_fails_leaves_damage_until_a_pull_succeeds(file: Path) -> None:
    """Each report after it says so, that of a description too."""
    model = Model()
    server = serving(model)
    model.error = ValueError("no room")
    report = obey(server, order(file, mode="checkpoint"))
    assert (False, "server", True) == (report["ok"], report["kind"], report["touched"])
    assert "load_weights: ValueError: no room" in report["error"]
    assert obey(server, order(file, address="/none"))["touched"]
    model.error = None
    assert not obey(server, order(file, mode="checkpoint"))["touched"]


def test_an_engine_that_raises_is_reported(file: Path) -> None:
    """Whatever it is; its type is told."""

    def explode() -> None:
        raise MemoryError("the device is full")

    report = obey(serving(Model(), after=explode), order(file, mode="checkpoint"))
    assert (False, "server", True) == (report["ok"], report["kind"], report["touched"])
    assert "MemoryError: the device is full" in report["error"]


def test_the_report_reaches_the_listener_that_gave_the_order(file: Path) -> None:
    """Under the order's own key; a listener that is gone is not waited for."""
    listener, server = ReportListener(), serving(Model())
    with listener.open(order(file), mode="in_place", ranks=1) as pending:
        server.obey(pending.text)
        assert 3 == pending.wait().policy_version
    listener.close()
    assert server.obey(pending.text)["ok"]


def test_a_pull_that_never_began_leaves_the_model_as_it_computes(tmp_path: Path) -> None:
    """A loader that is made ready takes the weights away: not before there are others."""
    said: list[str] = []
    server = serving(Model(), before=lambda: said.append("before"))
    report = obey(server, order(tmp_path / "gone", mode="checkpoint"))
    assert (False, False, []) == (report["ok"], report["touched"], said)


def test_a_loader_counts_anew_for_each_try() -> None:
    """vLLM takes a module for complete when enough elements came, from whichever try."""
    said: list[str] = []
    loading = Loading(before=lambda: said.append("before"), after=lambda: said.append("after"))
    target = ModelTarget(Model(), torch.device("cpu"), loading)
    pieces = [Piece("load", "bias", "float32", 0, (2,))]
    target.expect(pieces)
    target.expect(pieces)  # the first try broke off
    target.settle()
    target.settle()
    assert said == ["before", "after", "before", "after"]


def test_packed_weights_are_not_overwritten_by_a_loader_that_cannot_pack(file: Path) -> None:
    """SGLang's would copy bfloat16 over FP8 without its scale, and say nothing."""
    model = Model()
    model.register_parameter(
        "packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), False)
    )
    report = obey(serving(model, packs_again=False), order(file, mode="checkpoint"))
    assert (False, "layout", False) == (report["ok"], report["kind"], report["touched"])
    assert "packed is float8_e4m3fn" in report["error"]
    assert obey(serving(model, packs_again=True), order(file, mode="checkpoint"))["ok"]


@pytest.mark.parametrize(
    ("method", "is_turned"),
    [
        ({"unquantized_backend": SimpleNamespace(name="FLASHINFER_CUTLASS")}, True),  # vLLM
        ({"unquantized_backend": SimpleNamespace(name="TRITON")}, False),
        ({"load_up_proj_weight_first": True}, True),  # SGLang
        ({"load_up_proj_weight_first": False}, False),
    ],
)
def test_experts_of_a_kernel_that_turns_them_go_through_the_loader(
    method: dict[str, object], is_turned: bool
) -> None:
    """Shapes are equal: in place, each token's gate would be multiplied as its up matrix."""
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 6, 4))
    model.experts.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
    model.experts.quant_method = SimpleNamespace(**method)
    target = ModelTarget(model, torch.device("cpu"), Loading())
    source: list[Row] = [
        ("experts.down_proj", "float32", (2, 4, 3)),
        ("experts.gate_up_proj", "float32", (2, 6, 4)),
    ]
    plan = make_plan(source, rows_of(target.tensors), mode="auto")
    assert {"load" if is_turned else "parameter"} == {piece.place for piece, _ in plan}


class Naming(Model):
    """Its loader tells what it filled, as vLLM's does; `extra` has no tensor of the trainer's."""

    def __init__(self, *, has_extra: bool) -> None:
        super().__init__()
        self.names_nothing = False
        if has_extra:
            self.extra = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Any:
        given = list(tensors)
        super().load_weights(iter(given))
        return None if self.names_nothing else {name for name, _ in given}


def test_a_parameter_that_the_loader_passes_over_is_named(file: Path) -> None:
    """Else it would keep the weights of the server's start, and the pull would seem whole."""
    model = Naming(has_extra=True)
    report = obey(serving(model), order(file, mode="checkpoint"))
    assert (False, "layout", True) == (report["ok"], report["kind"], report["touched"])
    assert "filled all but extra:" in report["error"]
    assert obey(serving(Naming(has_extra=False)), order(file, mode="checkpoint"))["ok"]
    model.names_nothing = True  # as most of SGLang's loaders: then what they write is watched
    report = obey(serving(model, names_filled=False), order(file, mode="checkpoint"))
    assert (False, "layout", True) == (report["ok"], report["kind"], report["touched"])
    assert "filled all but extra:" in report["error"]
    whole = Naming(has_extra=False)
    whole.names_nothing = True
    assert obey(serving(whole, names_filled=False), order(file, mode="checkpoint"))["ok"]


class Fusing(torch.nn.Module):
    """Loads as SGLang's Qwen3 does: parts by a weight loader, and the rest through `data`."""

    def __init__(self, passes_over: str = "") -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), False)
        self.qkv_proj = torch.nn.Linear(2, 8, bias=False, dtype=torch.bfloat16)
        self.replaced = torch.nn.Parameter(torch.zeros(2), False)
        self._passes_over = passes_over

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        places = {"q_proj": slice(0, 4), "k_proj": slice(4, 6), "v_proj": slice(6, 8)}
        with torch.inference_mode():
            for name, tensor in tensors:
                part = name.partition(".")[0]
                if name == self._passes_over:
                    continue
                if part in places:
                    self.qkv_proj.weight.data[places[part]].copy_(tensor)
                elif name == "replaced":
                    self.replaced.data = tensor.clone()
                else:
                    self.norm.data.copy_(tensor)


@pytest.mark.parametrize("passed_over", ["", "norm", "v_proj.weight", "replaced"])
def test_what_a_loader_writes_is_known_without_its_word(tmp_path: Path, passed_over: str) -> None:
    """A part of a fused parameter too, though values are as they were: version 0 is what the
    server began with."""
    sent = {
        "norm": torch.zeros(3, dtype=torch.bfloat16),
        "replaced": torch.zeros(2),
        **{
            f"{part}_proj.weight": torch.zeros(rows, 2)
            for part, rows in zip("qkv", (4, 2, 2), strict=True)
        },
    }
    path = tmp_path / "v.safetensors"
    save_file(sent, path)
    what = order(path, mode="checkpoint", weight_hash=weight_hash(sent))
    report = obey(serving(Fusing(passed_over), names_filled=False), what)
    assert report["ok"] == (not passed_over)
    if passed_over:
        lacking = "qkv_proj.weight" if passed_over.startswith("v_") else passed_over
        assert f"filled all but {lacking}:" in report["error"]


def test_a_loader_that_knows_experts_one_by_one_is_given_them_so(tmp_path: Path) -> None:
    """SGLang's passes stacked ones over without a word, and the old experts would stay."""
    stacked = {
        "mlp.experts.down_proj": torch.arange(12.0).view(2, 2, 3),
        "mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 6, 2),
    }
    path = tmp_path / "v.safetensors"
    save_file(stacked, path)
    model = Recorder()
    what = order(path, mode="checkpoint", weight_hash=weight_hash(stacked))
    assert obey(serving(model, takes_fused_experts=False), what)["ok"]
    names = ("gate_proj", "up_proj", "down_proj")
    assert {f"mlp.experts.{i}.{name}.weight" for i in range(2) for name in names} == set(
        model.given
    )
    fused = stacked["mlp.experts.gate_up_proj"][1]
    halves = [model.given[f"mlp.experts.1.{name}.weight"] for name in names[:2]]
    assert torch.equal(fused, torch.cat(halves))
    assert obey(serving(model), what)["ok"]
    assert torch.equal(stacked["mlp.experts.down_proj"], model.given["mlp.experts.down_proj"])


def test_experts_with_a_bias_are_given_as_they_are(tmp_path: Path) -> None:
    """Those of gpt-oss: gate and up alternate, and its loader knows no expert by itself."""
    stacked = {
        "mlp.experts.down_proj": torch.arange(12.0).view(2, 3, 2),
        "mlp.experts.down_proj_bias": torch.zeros(2, 2),
        "mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 2, 6),
        "mlp.experts.gate_up_proj_bias": torch.zeros(2, 6),
    }
    path = tmp_path / "v.safetensors"
    save_file(stacked, path)
    model = Recorder()
    what = order(path, mode="checkpoint", weight_hash=weight_hash(stacked))
    assert obey(serving(model, takes_fused_experts=False), what)["ok"]
    assert stacked.keys() == model.given.keys()
