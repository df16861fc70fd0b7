"""The start command: what is ours cannot be overridden silently, all else is passed on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap import served
from rlstreams.workers.bootstrap.served import Where, command_of
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.command import StartCommand, is_older
from rlstreams.workers.engines.served.facts import Kind
from rlstreams.workers.engines.served.process import start_locks
from rlstreams.workers.loop.context import Context
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.unit.roles.stand import EXAMPLE


def made(kind: Kind, version: str, *overrides: str) -> StartCommand:
    config = load([EXAMPLE], overrides)
    return command_of(config, kind, Where(python="python3", version=version), 8000, {})


def test_a_server_is_started_with_all_that_the_adapter_needs() -> None:
    """Development routes, token route, log-probs of what was sampled, dummy weights, our plugin."""
    command = made(Kind.VLLM, "0.32.0")
    text = command.shell()
    for part in (
        "VLLM_SERVER_DEV_MODE=1",
        "NCCL_CUMEM_ENABLE=0",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--load-format dummy",
        "--host 127.0.0.1",
        '--weight-transfer-config \'{"backend":"rlstreams"}\'',
        "--enable-return-routed-experts",
        "--skip-tokenizer-init",
    ):
        assert part in text
    assert "--skip-tokenizer-init" in made(Kind.SGLANG, "0.5.17").shell()
    assert (
        "--custom-weight-loader rlstreams_server.sglang.receive"
        in made(Kind.SGLANG, "0.5.17").shell()
    )


def test_a_flag_that_a_version_does_not_know_is_left_out() -> None:
    """vLLM 0.25.1 always has the token route."""
    assert "--enable-scale-out" not in made(Kind.VLLM, "0.25.1").argv
    assert [is_older(v, (0, 26)) for v in ("0.25.1", "0.26.0", "0.32.0+cpu", "main")] == [
        True,
        False,
        False,
        False,
    ]


def test_arguments_of_the_users_are_passed_on() -> None:
    """Also over what we set only by default; true is a flag, false leaves it out."""
    command = made(
        Kind.VLLM,
        "0.32.0",
        "engine.args.max-num-seqs=7",
        "engine.args.enforce_eager=true",
        "engine.args.async-scheduling=false",
        "engine.env.X=1",
    )
    text = command.shell()
    assert "--max-num-seqs 7" in text
    assert "--enforce-eager" in text
    assert "async-scheduling" not in text
    assert "X=1" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.args.logprobs-mode=raw_logprobs", "engine.args.logprobs-mode is 'raw_logprobs'"),
        ("engine.args.port=1", "engine.args.port is 1, but rlstreams needs 8000"),
        ("engine.env.NCCL_CUMEM_ENABLE=1", "engine.env.NCCL_CUMEM_ENABLE is '1'"),
    ],
)
def test_what_is_ours_is_refused_by_name(override: str, message: str) -> None:
    """Silently it would cost a guarantee."""
    with pytest.raises(ConfigError, match=message):
        made(Kind.VLLM, "0.32.0", override)


def test_the_command_for_containers_holds_the_same_words() -> None:
    """Docker and Kubernetes get what the shell gets."""
    command = made(Kind.VLLM, "0.32.0", "engine.args.tensor-parallel-size=2")
    for text in (command.docker("i:1"), command.kubernetes("i:1")):
        assert "i:1" in text
        assert "VLLM_SERVER_DEV_MODE" in text
        assert "tensor-parallel-size" in text


def test_a_secret_of_the_servers_is_printed_as_the_reference_that_it_is() -> None:
    """What is printed asks for it where it is used."""
    command = made(
        Kind.VLLM, "0.32.0", "engine.env.HF_TOKEN=env:MINE", "engine.env.A_KEY=file:/run/a b"
    )
    assert 'HF_TOKEN="$MINE"' in command.shell()
    assert """-e A_KEY="$(cat '/run/a b')\"""" in command.docker("i:1")
    reference = '"valueFrom": {"secretKeyRef": {"name": "rlstreams", "key": "HF_TOKEN"}}'
    assert reference in command.kubernetes("i:1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.urls=['nowhere']",), "engine.urls must be like http://host:port"),
        (("engine.urls=['http://a:1','http://a:1']",), "names a server twice"),
        (("engine.urls=['http://a:1','http://a:1/']",), "names a server twice"),
        (("engine.urls=['http://a:1']", "rollout.workers=2"), "a server belongs to one worker"),
        (("engine.host=0.0.0.0",), "control routes ask for no key"),
        (("engine.host=::1",), "engine.host must be an IPv4 address or a host name, got '::1'"),
        (("engine.report_host=0.0.0.0",), "engine.report_host is '0.0.0.0': servers are told this"),
        (("engine.report_host=::1",), "engine.report_host must be an IPv4 address or a host name"),
        (("weights.channel=gloo", "weights.host=::"), "weights.host is '::': pullers are told"),
        (("weights.channel=nccl", "weights.host="), "weights.host is '': pullers are told"),
        (("weights.channel=nccl", "weights.host=::1"), "weights.host must be an IPv4 address"),
        (("rollout.engine=sglang", "rollout.top_k=5"), "uncut distribution"),
        (("rollout.engine=vllm", "rollout.temperature=3"), "vLLM takes at most 2"),
        (
            ("rollout.engine=vllm", "prompts.evaluate_temperature=3"),
            "prompts.evaluate_temperature is 3, but vLLM takes at most 2",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load([EXAMPLE], overrides)


@pytest.mark.parametrize(
    ("words", "ordinal", "expected"),
    [
        ((), 0, {"vllm-0": "0,1,2,3"}),
        (("engine.servers=2",), 0, {"vllm-0": "0", "vllm-1": "1"}),
        (("engine.servers=2", "rollout.workers=2"), 1, {"vllm-2": "2", "vllm-3": "3"}),
        (("engine.servers=2", "engine.args.tp=2"), 0, {"vllm-0": "0,1", "vllm-1": "2,3"}),
        (("rollout.workers=6",), 5, {"vllm-5": "1"}),
        (("engine.args.kv-cache-memory-bytes=1000",), 0, {"vllm-0": "0,1,2,3"}),
    ],
)  # fmt: skip
def test_servers_of_all_workers_are_dealt_the_gpus_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], ordinal: int,
    expected: dict[str, str],
) -> None:  # fmt: skip
    """To each as many as it is spread over; more servers than GPUs begin again at the first."""
    monkeypatch.setattr(
        served, "where_installed", lambda *_: Where(python="python3", version="0.32.0")
    )
    config = load(
        [EXAMPLE],
        [f"run.dir={tmp_path}", "rollout.engine=vllm", "engine.port=9000",
         'engine.env.CUDA_VISIBLE_DEVICES="0,1,2,3"', *words],
    )  # fmt: skip
    context = Context(
        config=config, bus=MemoryBus(made_log("demo"), "demo"), role="rollout", ordinal=ordinal,
        instance="one",
    )  # fmt: skip
    monkeypatch.setattr(served, "start_locks", lambda gpus: [tmp_path / gpus])
    engine = served.make_served_engine(context)
    processes = [monitor._process for monitor in engine._monitors]
    asyncio.run(engine.close())
    found = {
        process.log.stem: process._command.environment["CUDA_VISIBLE_DEVICES"]
        for process in processes
        if process is not None
    }
    assert expected == found
    # A named cache is not measured: its server waits for no other to start.
    waits = {process._locks[0].name for process in processes if process and process._locks}
    assert waits == (set() if "kv-cache-memory-bytes" in config.engine.args else {*found.values()})
    ports = [9000 + int(name.rpartition("-")[2]) for name in expected]
    assert [f"http://127.0.0.1:{port}" for port in ports] == [s.url for s in engine._servers]
    assert engine.capacity == config.engine.max_running * len(ports)


def test_a_lock_for_each_gpu_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of one GPU name the same file; where there is no GPU, nobody waits."""
    assert [] == list(start_locks("0")) or Path("/dev/nvidia0").exists()
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/dev/nvidia{n}") for n in range(2)])
    both, one = start_locks(None), start_locks("0")
    assert ["gpu-0.lock", "gpu-1.lock"] == [path.name[-10:] for path in both]
    assert list(one) == [both[0]]


def test_several_servers_are_ours() -> None:
    with pytest.raises(ConfigError, match=r"engine\.servers is 2, but engine\.urls names 1"):
        load([EXAMPLE], ["engine.servers=2", 'engine.urls=["http://127.0.0.1:1"]'])
    with pytest.raises(ConfigError, match=r"engine\.servers"):
        load([EXAMPLE], ["engine.servers=0"])
