"""The cluster that users start says what the embedded broker says, where both say it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rlstreams.__main__ import parsed
from rlstreams.show.metrics.prometheus import families
from rlstreams.streams.broker.config import server_properties
from rlstreams.streams.broker.jars import KAFKA_VERSION
from rlstreams.streams.views.feed import Views
from rlstreams.workers.config.load import over
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.rollout.worker import CLOSE_S

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


def test_kubernetes_would_accept_workers_that_join() -> None:
    """Their commands are commands, they are given longer to end than they drain, their number is
    scaled by a figure that we serve, and no more come than there are partitions."""
    import kubernetes_validate

    text = (ROOT / "infra/hosts/kubernetes-joining.yaml").read_text("utf-8")
    items = {item["kind"]: item for item in yaml.safe_load(text)["items"]}
    for item in items.values():
        kubernetes_validate.validate(item, "1.33", strict=True)
    deployment, scaler = items["Deployment"], items["HorizontalPodAutoscaler"]
    pod = deployment["spec"]["template"]["spec"]
    (server,), (worker,) = pod["initContainers"], pod["containers"]
    assert server["restartPolicy"] == "Always"
    of_role = {one["args"][2]: parsed(one["args"][1:]).params for one in (server, worker)}
    assert {("kafka-1:9094", "demo")} == {(of["join"], of["run"]) for of in of_role.values()}
    own = over(RunConfig(), of_role["rollout"]["config"].overrides, "the manifest")
    assert pod["terminationGracePeriodSeconds"] >= own.deadlines.drain_s + CLOSE_S
    (port,) = (word for word in server["args"] if word.startswith("--engine.port="))
    assert own.engine.urls == (f"http://127.0.0.1:{port.partition('=')[2]}",)
    assert worker["livenessProbe"]["httpGet"]["port"] == of_role["rollout"]["health_port"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["spec"]["maxReplicas"] + own.rollout.workers == own.broker.headroom
    (metric,) = scaler["spec"]["metrics"]
    wanted = metric["external"]
    labels = {
        f"rlstreams_{family.name}": {"run", *family.labels} for family in families(Views().state)
    }
    assert set(wanted["metric"]["selector"]["matchLabels"]) == labels[wanted["metric"]["name"]]
    assert int(wanted["target"]["averageValue"]) == own.engine.max_running


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
