"""With the rights of `broker topics --acls` a role gets at its topics, and at no others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from rlstreams.__main__ import main
from rlstreams.streams.broker import embedded, password
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Reader
from rlstreams.streams.log.errors import BrokerError, OutcomeUnknownError, TopicMismatchError
from rlstreams.streams.log.record import Committed, Outgoing, Partition
from rlstreams.streams.log.rights import (
    OPERATOR,
    PRINCIPALS,
    UP,
    Acl,
    NoRightError,
    OfRole,
    acls,
)
from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import TOPICS

RUN, OF_UP = "rights", "rights-up"
WORD = "a-word-of-this-test"
ANSWER_S = 30.0
GROUPS = {"rollout": "prompts", "logprob": "trajectories"}  # roles with a group, and what it reads


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """With an authorizer, and a user for each role who may nothing yet."""
    settings = password.broker_settings

    def with_users(folder: Path) -> Mapping[str, str]:
        users = "".join(f' user_rl-{role}="{WORD}"' for role in PRINCIPALS)
        found = dict(settings(folder))
        for name, value in found.items():
            if name.endswith("jaas.config"):
                found[name] = value.replace(";", f"{users};")
        return found | {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{password.USER}",
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "broker_settings", with_users)
        broker = EmbeddedBroker(tmp_path_factory.mktemp("rights"), has_password=True)
        broker.start()
    yield broker
    broker.stop()


def binding(role: str, acl: Acl, operation: str) -> AclBinding:
    kinds = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP}
    words = {"DescribeConfigs": "DESCRIBE_CONFIGS"}
    return AclBinding(
        kinds.get(acl.resource, ResourceType.TRANSACTIONAL_ID),
        acl.name,
        ResourcePatternType.PREFIXED if acl.is_prefix else ResourcePatternType.LITERAL,
        f"User:rl-{role}",
        "*",
        AclOperation[words.get(operation, operation.upper())],
        AclPermissionType.ALLOW,
    )


@pytest.fixture(scope="module")
def bootstrap(broker: EmbeddedBroker) -> str:
    """Of the broker, once all roles have their rights."""
    state = broker.status()
    assert state is not None
    ours = password.client_options(broker.folder)
    apply(state.bootstrap, RUN, TopicPlan(rollout_workers=1, logprob_workers=1), ours)
    wanted = [
        binding(role, acl, operation)
        for role in PRINCIPALS
        for acl in acls(RUN if role != UP else OF_UP, role)
        for operation in acl.operations
    ]
    client = AdminClient({"bootstrap.servers": state.bootstrap, **ours})  # kept: see `KafkaBus`
    for answer in client.create_acls(wanted).values():
        answer.result(ANSWER_S)
    return state.bootstrap


def partitions(bus: OfRole, topic: str) -> int:
    """Of a topic; a right that was given a moment ago may not be known to the broker yet."""
    until_s = time.monotonic() + ANSWER_S
    while True:
        try:
            return bus.partitions(topic)
        except TopicMismatchError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def login_of(role: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": f"rl-{role}",
        "sasl.password": WORD,
    }


def as_user(bootstrap: str, role: str, run: str = RUN) -> KafkaBus:
    return KafkaBus(bootstrap, run, options=login_of(role))


def polled(reader: Reader) -> None:
    """For as long as a refusal may take."""
    for _ in range(20):
        reader.poll(10, 1.0)


FEW = ("rollout", "trainer")  # with most rights between them
EACH = [pytest.param(r, marks=() if r in FEW else pytest.mark.slow) for r in ROLES]


@pytest.mark.parametrize("role", EACH)
def test_a_role_gets_at_its_topics_and_at_no_other(bootstrap: str, role: str) -> None:
    """What `OfRole` lets through the broker takes; what it refuses the broker refuses too."""
    writes = [t.name for t in TOPICS if role in t.written_by]
    reads = [t.name for t in TOPICS if {role, "any"} & set(t.read_by)]
    others = [t.name for t in TOPICS if t.name not in reads]
    with as_user(bootstrap, role) as plain:
        bus = OfRole(plain, role)
        for topic in TOPICS:
            assert partitions(bus, topic.name) >= 1
            assert bus.settings(topic.name)
        with bus.producer(f"{role}.0") as producer:
            for name in writes:
                producer.commit([Outgoing(topic=name, key=b"k", value=(b"v",), partition=0)])
            if role in GROUPS:
                partition = Partition(GROUPS[role], 0)
                with bus.consumer(role, [GROUPS[role]]) as consumer:
                    while partition not in consumer.positions():
                        consumer.poll(10, 1.0)
                    producer.commit([], {partition: Committed(offset=0, metadata="")}, consumer)
        with bus.appender() as appender:
            for name in writes:
                record = Outgoing(topic=name, key=b"k", value=(b"v",), partition=0)
                appender.append(record).result(ANSWER_S)
        for name in reads:
            with bus.reader(bus.beginnings(name)) as reader:
                reader.poll(10, 2.0)
        for name in others:
            with pytest.raises(NoRightError, match=f"role {role} reads {name}"):
                bus.reader({Partition(name, 0): 0})
            with plain.reader({Partition(name, 0): 0}) as reader, pytest.raises(BrokerError):
                polled(reader)
        for name in (t.name for t in TOPICS if t.name not in writes):
            record = Outgoing(topic=name, key=b"k", value=(b"v",), partition=0)
            with pytest.raises(NoRightError, match=f"role {role} writes {name}"):
                bus.appender().append(record)
            with plain.appender() as appender, pytest.raises(BrokerError):
                appender.append(record).result(ANSWER_S)


def test_an_operator_reads_everything_and_steers(bootstrap: str) -> None:
    """What commands do: all topics, positions of groups, `control`; and no sample."""
    record = {"key": b"k", "value": (b"v",), "partition": 0}
    with as_user(bootstrap, OPERATOR) as bus:
        for topic in TOPICS:
            with bus.reader(bus.beginnings(topic.name)) as reader:
                reader.poll(10, 2.0)
        for group, topic_name in GROUPS.items():
            assert bus.committed(group, topic_name) is not None
        for name in ("control", OPERATOR):
            with bus.producer(name) as producer:
                producer.commit([Outgoing(topic="control", **record)])
        with (
            bus.producer(OPERATOR) as producer,
            pytest.raises(OutcomeUnknownError, match="refused: TOPIC_AUTHORIZATION_FAILED"),
        ):
            producer.commit([Outgoing(topic="prompts", **record)])
        with pytest.raises(BrokerError):
            bus.producer("trainer.0")


def test_up_makes_the_topics_of_its_run_and_of_no_other(bootstrap: str) -> None:
    plan, own = TopicPlan(rollout_workers=1, logprob_workers=1), login_of(UP)
    assert len(TOPICS) == len(apply(bootstrap, OF_UP, plan, own))
    with as_user(bootstrap, UP, OF_UP) as bus, bus.producer("trainer.0") as producer:
        producer.commit([Outgoing(topic="steps", key=b"k", value=(b"v",), partition=0)])
    with pytest.raises(BrokerError):
        apply(bootstrap, RUN, plan, own)


def test_they_are_printed_for_kafkas_own_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('extends = "example:demo.toml"\n[run]\nid = "mine"\n')
    assert 0 == main(["broker", "topics", str(tmp_path / "run.toml"), "--acls", "User:rl"])
    lines = capsys.readouterr().out.splitlines()
    assert (
        "--add --allow-principal User:rl-rollout --operation Read --operation Write "
        "--operation Describe --operation DescribeConfigs --topic mine.calls"
    ) in lines
    assert len(lines) == len(ROLES) * (len(TOPICS) + 3) + len(TOPICS) + 4 + 3
    assert "--add --allow-principal User:rl-up --operation All --topic mine. " in lines[-3] + " "
