"""The start command: what is ours cannot be overridden silently, all else is passed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap import model_server, served
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.bootstrap.model_server import Where, command_of
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.engines.served.facts import Kind, is_older
from rlstreams.workers.loop.context import Context
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.unit.roles.stand import EXAMPLE

URL = "http://127.0.0.1:8000"


def made(kind: Kind, version: str, *overrides: str) -> StartCommand:
    config = load([EXAMPLE], overrides)
    return command_of(config, kind, Where(python="python3", version=version), URL, {})


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
        (
            ("engine.report_host=0.0.0.0",),
            "engine.report_host is '0.0.0.0': servers are given this",
        ),
        (("engine.report_host=::1",), "engine.report_host must be an IPv4 address or a host name"),
        (("weights.channel=gloo", "weights.host=::"), "weights.host is '::': pullers are given"),
        (("weights.channel=nccl", "weights.host="), "weights.host is '': pullers are given"),
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


def context_of(folder: Path, role: str, ordinal: int, *words: str) -> Context:
    """Of one process of a run with vLLM, whose servers have ports from 9000 on."""
    config = load(
        [EXAMPLE], [f"run.dir={folder}", "rollout.engine=vllm", "engine.port=9000", *words]
    )
    return Context(
        config=config, bus=MemoryBus(made_log("demo"), "demo"), role=role, ordinal=ordinal,
        instance="one",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["0,1,2,3"]),
        (("engine.servers=2",), ["0", "1"]),
        (("engine.servers=2", "rollout.workers=2"), ["0", "1", "2", "3"]),
        (("engine.servers=2", "engine.args.tp=2"), ["0,1", "2,3"]),
        (("rollout.workers=6",), ["0", "1", "2", "3", "0", "1"]),
        (("engine.args.kv-cache-memory-bytes=1000",), ["0,1,2,3"]),
    ],
)
def test_the_servers_of_a_run_are_dealt_the_gpus_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: list[str]
) -> None:
    """To each as many as it is spread over; more servers than GPUs begin again at the first."""
    monkeypatch.setattr(
        model_server, "where_installed", lambda *_: Where(python="python3", version="0.32.0")
    )
    monkeypatch.setattr(model_server, "start_locks", lambda gpus: [tmp_path / gpus])
    words = ('engine.env.CUDA_VISIBLE_DEVICES="0,1,2,3"', *words)
    found, waits, urls = [], [], []
    for number in range(len(expected)):
        role = model_server.make_server_role(context_of(tmp_path, "server", number, *words))
        process = role._process
        assert process.log.name == f"vllm-{number}.log"
        found.append(process._command.environment["CUDA_VISIBLE_DEVICES"])
        waits += [lock.name for lock in process._locks]
        urls.append(role._url)
        role.close()
    assert expected == found
    # A named cache is not measured: its server waits for no other to start.
    assert waits == ([] if "cache" in words[-1] else expected)
    assert urls == [f"http://127.0.0.1:{9000 + number}" for number in range(len(expected))]


@pytest.mark.parametrize("is_named", [False, True])
async def test_servers_are_dealt_to_workers_like_cards(tmp_path: Path, is_named: bool) -> None:
    """Each belongs to one worker, also where a worker has one more than another."""
    urls = [f"http://127.0.0.1:{9000 + number}" for number in range(5 if is_named else 4)]
    words = ["rollout.workers=2", f"engine.urls={urls}" if is_named else "engine.servers=2"]
    for ordinal in range(2):
        context = context_of(tmp_path, "rollout", ordinal, *words)
        engine = served.make_served_engine(context)
        await engine.close()
        assert urls[ordinal::2] == list(engine.servers)
        assert engine.max_capacity == context.config.engine.max_running * len(engine.servers)


def test_all_processes_of_a_run_know_the_same_addresses(tmp_path: Path) -> None:
    """`up` chooses free ports once and says them; without it they have to be named."""
    config = context_of(tmp_path, "rollout", 0, "engine.port=0", "engine.servers=3").config
    chosen = own_urls(config)
    assert 3 == len({*chosen})
    context = Context(
        config=config, bus=MemoryBus(made_log("demo"), "demo"), role="server", ordinal=2,
        instance="one", server_urls=chosen,
    )  # fmt: skip
    assert chosen == model_server.server_urls(context)
    with pytest.raises(ConfigError, match=r"engine\.port is 0, a free one.*or engine\.urls"):
        model_server.server_urls(context_of(tmp_path, "server", 0, "engine.port=0"))


def test_every_setting_of_servers_reaches_them() -> None:
    """The value of each field that the section `[engine]` has a name for."""
    given = {
        "engine.max_running": 7, "engine.on_pull": "wait", "engine.cache_on_pull": "recompute",
        "engine.request_s": 3.0, "engine.answer_s": 4.0, "engine.start_s": 5.0,
        "engine.silent_s": 6.0, "engine.allow_untested": True, "weights.pull_deadline_s": 8.0,
        "rollout.capture_experts": False, "rollout.engine": "sglang",
    }  # fmt: skip
    words = [f"{name}={str(value).lower()}" for name, value in given.items()]
    found = served.settings_of(load([EXAMPLE], words))
    assert (found.limit, found.on_pull, found.keep_cache) == (7, "wait", False)
    assert (found.request_s, found.answer_s, found.start_s, found.silent_s) == (3, 4, 5, 6)
    assert (found.pull_s, found.allow_untested, found.capture_experts) == (8, True, False)
    assert found.kind is Kind.SGLANG
    assert served.settings_of(load([EXAMPLE], ["rollout.engine=vllm"])).keep_cache


def test_several_servers_are_ours() -> None:
    with pytest.raises(ConfigError, match=r"engine\.servers is 2, but engine\.urls names 1"):
        load([EXAMPLE], ["engine.servers=2", 'engine.urls=["http://127.0.0.1:1"]'])
    with pytest.raises(ConfigError, match=r"engine\.servers"):
        load([EXAMPLE], ["engine.servers=0"])
