"""The cluster that users start says what the embedded broker says, where both say it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rlstreams.__main__ import parsed
from rlstreams.streams.broker.config import server_properties
from rlstreams.streams.broker.jars import KAFKA_VERSION

ROOT = Path(__file__).parents[3]
COMPOSE = (ROOT / "infra/compose.yaml").read_text("utf-8")
# One node has no others; and its folder, ports and memory are its own.
OWN = {"node.id", "listeners", "controller.quorum.voters", "log.dirs", "advertised.listeners"}


def properties_of(text: str) -> dict[str, str]:
    found = re.findall(r'^ +KAFKA_([A-Z_]+): "?([^"\n]+)"?$', text, re.MULTILINE)
    return {name.lower().replace("_", "."): value for name, value in found}


def test_both_run_the_same_version() -> None:
    """The image's default is the version of the pinned jars."""
    assert f"${{KAFKA_IMAGE:-apache/kafka:{KAFKA_VERSION}}}" in COMPOSE


def test_settings_that_both_name_are_equal() -> None:
    """Sessions, clean-up intervals and retention: a cluster is no slower to notice a death."""
    lines = server_properties(Path("data"), 1, 2).splitlines()
    embedded = dict(line.split("=", 1) for line in lines)
    cluster = properties_of(COMPOSE)
    both = (embedded.keys() & cluster.keys()) - OWN

    assert {"group.consumer.session.timeout.ms", "offsets.retention.minutes"} <= both
    assert {name: embedded[name] for name in both} == {name: cluster[name] for name in both}


def test_each_node_has_an_address_of_its_own() -> None:
    """Published port and advertised port are the same, else no client comes back."""
    published = re.findall(r'ports: \["127\.0\.0\.1:(\d+):9092"\]', COMPOSE)
    advertised = re.findall(r"PLAINTEXT://127\.0\.0\.1:(\d+),INTERNAL://kafka-(\d)", COMPOSE)

    assert ["29091", "29092", "29093"] == published == [port for port, _ in advertised]
    assert ["1", "2", "3"] == [node for _, node in advertised]


def test_kubernetes_would_accept_its_manifests() -> None:
    """By the schemas of its API, where an unknown field is an error; by nothing else."""
    import kubernetes_validate

    text = (ROOT / "infra/hosts/kubernetes.yaml").read_text("utf-8")
    kinds = []
    for item in yaml.safe_load(text)["items"]:
        kinds.append(item["kind"])
        kubernetes_validate.validate(item, "1.33", strict=True)
    servers = ["Job", "Service"]  # of rollout 0
    assert ["Job", *servers, "Job", "Service", "PersistentVolumeClaim", "Deployment"] == kinds


def test_commands_of_roles_are_commands() -> None:
    """In compose and on Kubernetes: what follows `keep.sh` or `rlstreams` is parsed."""
    compose = yaml.safe_load(COMPOSE)["services"]
    text = (ROOT / "infra/hosts/kubernetes.yaml").read_text("utf-8")
    pods = [
        i["spec"]["template"]["spec"]
        for i in yaml.safe_load(text)["items"]
        if "template" in i["spec"]
    ]
    lines = [service["command"].split() for service in compose.values() if "command" in service]
    commands = [
        ["worker", *words[2:]] for words in lines if words[0] == "sh" and "keep" in words[1]
    ]
    commands += [words[1:] for words in lines if words[0] == "rlstreams"]
    commands += [pod["containers"][0]["args"][1:] for pod in pods]
    assert (10, {"worker", "web"}) == (len(commands), {words[0] for words in commands})
    for words in commands:
        parsed(words)
