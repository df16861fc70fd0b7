"""Agreement of a worker's configuration with that of the trainer's claim. Pure.

Compared are the settings that a role computes with, and the files that it read at its start: user
code, templates and parsers of judges, held-out rows, the reference's weights. Places of files,
devices, threads and the broker's address are each host's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.addresses import is_loopback
from rlstreams.streams.digests import file_sha256
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.topic_plan import SHARED
from rlstreams.workers.config.hub import found_folder, model_folder
from rlstreams.workers.config.run import START, RunConfig
from rlstreams.workers.config.user_code import code_hashes, option_hashes, source_texts
from rlstreams.workers.dataset.identity import data_hashes
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.loop.host import NOT_INSTALLED, commit, library_versions, release_of
from rlstreams.workers.weights.folder_digest import folder_digest

COMPUTED_WITH: Mapping[str, tuple[str, ...]] = {
    "prompts": ("run.seed", "prompts", "trainer.groups_per_step", "trainer.max_staleness"),
    "rollout": (
        "run.seed",
        "rollout",
        "reward",
        "environment",
        "agent",
        "judge.model",
        "judge.engine",
        "judge.args",
        "prompts.evaluate_temperature",
        "prompts.evaluate_max_tokens",
        "model.dtype",
        "weights.channel",
    ),
    "server": ("rollout.engine", "rollout.capture_experts", "weights.channel"),
    "logprob": (
        "logprob",
        "trainer.loss.kl_coef",
        "trainer.loss.distill_top_k",
        "trainer.routing_replay",
        "model.dtype",
        "weights.channel",
    ),
}
_OF_A_LIBRARY = frozenset(
    {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
)  # fields of a `config.json`
_CHANNEL = "weights.channel"  # a worker that cannot be sent to may follow the run's store
OF_A_HOST = frozenset(
    {
        "rollout.device",
        "rollout.slots",
        "rollout.commit_interval_s",
        "reward.processes",
        "reward.concurrency",
        "reward.memory_mb",
        "environment.processes",
        "environment.concurrency",
        "environment.memory_mb",
        "logprob.device",
        "logprob.ranks",
        "logprob.token_budget",
        "logprob.window_s",
        "logprob.versions_held",
        "logprob.commit_interval_s",
    }
)
# Settings that decide the reward of an answer, or the turns before it.
_JUDGED_WITH = (
    "reward.verifier",
    "reward.options",
    "reward.parts",
    "reward.require_stop",
    "environment.name",
    "environment.options",
    "environment.max_turns",
    "environment.role",
    "agent",
    "judge.model",
    "judge.engine",
    "judge.args",
)
# Of these, the ones that releases added later. They count where they are not the default: else an
# upgrade alone would be another grader, and groups in flight would be dropped.
_JUDGED_LATER = frozenset({"judge.model", "judge.engine", "judge.args"})
HELD_OUT = "held_out"
# Hashes of a claim.
REFERENCE, WEIGHTS = "reference numbers", "weight numbers"  # digests of samples


def disagreement(config: RunConfig, role: str, claim: TrainerStarted) -> str:
    """Differences between this worker and the claim, both values; empty: none that counts.

    Files are compared as they were when the worker began: `other_files_text`.
    """
    try:
        theirs = claimed_config(claim)
    except ConfigError as err:
        return str(err)
    ours_by_name = dict(_values(msgspec.to_builtins(config), role))
    theirs_by_name = dict(_values(msgspec.to_builtins(theirs), role))
    found = [
        f"{name} is {ours_by_name.get(name)!r} here and {theirs_by_name.get(name)!r} there"
        for name in sorted(ours_by_name.keys() | theirs_by_name.keys())
        if ours_by_name.get(name) != theirs_by_name.get(name)
        and not (name == _CHANNEL and config.weights.channel == "store" and theirs.store_address)
    ]
    here, there = tokenizer_hash(config.model.path), claim.hashes.get("tokenizer")
    if here and there and here != there:
        found.append(f"the tokenizer has SHA-256 {here[:12]} here and {there[:12]} there")
    here, there = shape_hash(config.model.path), claim.hashes.get("shape")
    if here and there and here != there:
        found.append(
            f"the model's shape and end tokens (config.json, generation_config.json) have SHA-256 "
            f"{here[:12]} here and {there[:12]} there"
        )
    if role == "logprob" and (there := claim.hashes.get(REFERENCE)):
        here = reference_digest(config)
        if here and here != there:
            found.append(
                f"the weights of logprob.reference {config.logprob.reference!r} have SHA-256 "
                f"{here[:12]} here and {there[:12]} there (of samples)"
            )
    return "; ".join(found)


def files_of(config: RunConfig, role: str) -> dict[str, str]:
    """SHA-256 of the files that a role of this name reads at its start, as a claim has them."""
    if role == "rollout":
        return user_code_hashes(config)
    return data_hashes(config.data, (HELD_OUT,)) if role == "prompts" else {}


def user_code_hashes(config: RunConfig) -> dict[str, str]:
    """SHA-256 of each file of user code on this host, by `FIELD: PATH`."""
    reward, environment = config.reward, config.environment
    called = [
        ("reward", "verifier", reward.verifier, reward.options),
        ("environment", "name", environment.name, environment.options),
    ]
    called += [
        (f"reward.parts {part.label!r}", "", part.verifier, part.options) for part in reward.parts
    ]
    called += [
        (f"agent {agent.name!r}", "python", agent.python, agent.options) for agent in config.agent
    ]
    found: dict[str, str] = {}
    for section, field, name, options in called:
        place = f"{section}.{field}" if field else section
        found |= {f"{place}: {path}": digest for path, digest in code_hashes(name).items()}
        found |= option_hashes(f"{section}.options", options)
    return found


def own_code(config: RunConfig) -> dict[str, str]:
    """Source text of the user's functions that train, on this host, by `FIELD: PATH`; see
    `TrainerStarted.code`.

    Raises:
        ConfigError: it cannot be recorded: see `source_texts`.
    """
    found: dict[str, str] = {}
    for field, name, _ in config.trainer.own():
        found |= source_texts(field, name)
    return found


def code_digests(code: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of each file of `own_code`, as a claim has them."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in code.items()}


def is_user_code(name: str) -> bool:
    """Whether a hash of a claim is that of a file of user code, by its name."""
    return name.startswith(("reward", "environment", "agent"))


def other_files(
    here: Mapping[str, str], there: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Files that differ, of fields whose files are on both hosts: name, and 12 digits of each
    SHA-256, "none" where a field's files are others."""
    both = {key.partition(": ")[0] for key in here} & {key.partition(": ")[0] for key in there}
    for key in sorted(here.keys() | there.keys()):
        ours, theirs = here.get(key, "none"), there.get(key, "none")
        if key.partition(": ")[0] in both and ours != theirs:
            yield key, ours[:12], theirs[:12]


def other_files_text(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Text on `other_files`; empty: none differs."""
    return "; ".join(
        f"{name} has SHA-256 {ours} here and {theirs} there"
        for name, ours, theirs in other_files(here, there)
    )


def judged_by(config: RunConfig, files: Mapping[str, str]) -> str:
    """16 hexadecimal digits of all that decides a reward: settings and user code."""
    tree, default = msgspec.to_builtins(config), msgspec.to_builtins(RunConfig())
    settings = [
        pair
        for name in _JUDGED_WITH
        if name not in _JUDGED_LATER or _at(tree, name) != _at(default, name)
        for pair in _leaves(name, _at(tree, name))
    ]
    text = json.dumps([settings, sorted(files.items())], separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_release(claim: TrainerStarted) -> str:
    """Text on `other_versions`; events of both releases are readable."""
    return "; ".join(
        f"{name} is {here} here and {there} at the trainer"
        for name, there, here in other_versions(claim)
    )


def other_versions(claim: TrainerStarted) -> list[tuple[str, str, str]]:
    """Our code and its libraries where another release of them is here: name, version of the
    trainer that made the claim, version here."""
    here, there = library_versions(), dict(claim.versions)
    ours, theirs = commit(), claim.versions.get("commit", "")
    if ours and theirs:
        here["rlstreams"] = release_of({**here, "commit": ours})
        there["rlstreams"] = release_of(there)
    return [
        (name, there[name], own)
        for name, own in here.items()
        if NOT_INSTALLED not in (own, there.get(name, NOT_INSTALLED)) and own != there[name]
    ]


def out_of_reach(claim: TrainerStarted, host: str) -> str:
    """Reason that no worker on `host` can pull weights from that trainer; empty: none."""
    try:
        weights = claimed_config(claim).weights
    except ConfigError:
        return ""  # `disagreement` reports it
    is_elsewhere = bool(claim.host) and claim.host != host
    if not is_elsewhere or not weights.is_link or not is_loopback(weights.host):
        return ""
    return (
        f"the trainer's weights.host is {weights.host}, which only its own host reaches; name the "
        "address or the name by which other hosts know it"
    )


def check_alone(config: RunConfig) -> None:
    """Check the settings of a worker that `up` did not start, beyond a valid configuration.

    Raises:
        ConfigError: workers of several hosts are to pull, and have no common secret; or roles
            share a device.
    """
    if config.devices:
        raise ConfigError(
            f"devices has {config.devices[0].name!r}, but only `rlstreams up` grants shifts on it: "
            "start the run with it, or remove [[devices]] and give each role its own GPU"
        )
    weights = config.weights
    if not weights.is_link or weights.secret or is_loopback(weights.host):
        return
    raise ConfigError(
        f"weights.host is {weights.host!r}, so workers on other hosts are to pull, but "
        "weights.secret is empty: each host would make a secret of its own; set it to env:NAME or "
        "file:PATH and give every host the same"
    )


def check_ordinal(config: RunConfig, role: str, ordinal: int) -> None:
    """Check that the configuration counts a worker of this ordinal: it deals partitions and model
    servers to those that it counts.

    Raises:
        ConfigError: it counts fewer.
    """
    is_judged = bool(config.judge.model)
    if role == "server" and not config.is_served and not is_judged:
        raise ConfigError(
            "rollout.engine is 'builtin', which samples in its worker: a run has a model server "
            "with 'vllm' or 'sglang'"
        )
    is_server = role == "server"
    count = config.num_servers + is_judged if is_server else config.num_workers(role)
    if ordinal < count:
        return
    why = f"{role}.workers is {count}" if count > 1 or role in SHARED else f"a run has one {role}"
    if role == "server":
        why = (
            f"there are {count} model servers (engine.urls, or engine.servers of each worker; "
            "judge.model is one more)"
        )
    others = f"0 to {count - 1} over all hosts" if count > 1 else "0"
    raise ConfigError(f"--ordinal {ordinal}: {why}, so ordinals are {others}")


def tokenizer_hash(model_path: str) -> str:
    """SHA-256 of the model's `tokenizer.json`, hexadecimal; empty without one."""
    file = model_folder(model_path) / "tokenizer.json" if model_path else None
    return file_sha256(file) if file is not None and file.is_file() else ""


def weights_digest(path: str, dtype: str) -> str:
    """Digest of samples of a model's weights, hexadecimal; empty: they are not on this host, or
    cannot be read, which the role that loads them reports.

    Args:
        path: its folder, or `hf:ORG/NAME`.
        dtype: `model.dtype`.
    """
    try:
        folder = found_folder(path)
    except ConfigError:
        return ""
    return folder_digest(folder, dtype) if folder else ""


def reference_digest(config: RunConfig) -> str:
    """Digest of the weights of a reference that is a folder of its own; empty: there is none, or it
    is not on this host."""
    is_own = config.trainer.loss.why_compared and config.logprob.reference != START
    return weights_digest(config.logprob.reference, config.model.dtype) if is_own else ""


def shape_hash(model_path: str) -> str:
    """SHA-256 of what a model's folder says of how its weights are used, and of what ends an
    answer, hexadecimal; empty without a `config.json` that can be read.

    Not of what a library writes of itself, and of types that `model.dtype` decides.
    """
    folder, found = model_folder(model_path) if model_path else None, []
    for name in ("config.json", "generation_config.json"):
        try:
            found.append(json.loads((folder / name).read_bytes()) if folder else None)
        except (OSError, ValueError):
            found.append(None)
    config, generation = found
    if not isinstance(config, dict):
        return ""
    ends = generation.get("eos_token_id") if isinstance(generation, dict) else None
    text = json.dumps([_without(config, _OF_A_LIBRARY), ends], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without(tree: Any, names: frozenset[str]) -> Any:  # noqa: ANN401
    if not isinstance(tree, dict):
        return tree
    return {key: _without(value, names) for key, value in tree.items() if key not in names}


def _values(tree: Mapping[str, Any], role: str) -> Iterator[tuple[str, object]]:
    for name in COMPUTED_WITH.get(role, ()):
        yield from _leaves(name, _at(tree, name))


def _at(tree: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    value: Any = tree
    for key in name.split("."):
        value = value[key]
    return value


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if name in OF_A_HOST:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    else:  # of a path only the file's name: folders are a host's own
        yield name, Path(value).name if isinstance(value, str) and "/" in value else value
