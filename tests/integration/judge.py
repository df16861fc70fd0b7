"""A judge of runs, written from `rlstreams/schemas/README.md` alone, on fastavro and kafka-python.

It says where every issued sample is. It must import none of our packages but `stranger`, which
imports none; a test looks.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter

from fastavro import schemaless_reader

from tests.integration import stranger

TOPICS = ("steps", "prompts", "trajectories", "scored-trajectories", "dead-letters")
GROUPS = {"rollout": "prompts", "logprob": "trajectories"}
NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def read_run(bootstrap, run, **login):
    """Messages of each topic, and what groups committed.

    Args:
        login: of kafka-python, for a broker with a password.
    """
    commits = {}
    for group, topic in GROUPS.items():  # before the topics: what they cover must be there
        found = stranger.commits(bootstrap, f"{run}.{group}", f"{run}.{topic}", **login)
        commits |= {(topic, number): at for number, at in found.items()}
    return {topic: stranger.read(bootstrap, f"{run}.{topic}", **login) for topic in TOPICS}, commits


class Judge:
    """`classes`: samples by class; `twice`: trained twice; `staleness`: tokens by staleness."""

    def __init__(self, log, commits, schemas):
        self.schemas, self.log = schemas, log
        self.done = {at: (low, stranger.done_set(low, text)) for at, (low, text) in commits.items()}
        self.trained, self.dropped, self.absent, self.closed = {}, {}, {}, set()
        self.positions, self.twice = {}, 0
        self._fold_steps()
        self.prompts = self._first("prompts", "Prompt")
        self.trajectories = self._first("trajectories", "Trajectory")
        self.scores = self._first("scored-trajectories", "ScoredTrajectory")
        self.dead = self._dead()
        self.classes = Counter(self._class(name) for name in self.prompts)
        self.staleness = self._staleness()

    def _events(self, topic):
        for first, value, _ in stranger.whole_values(self.log[topic]):
            try:
                assert value[:2] == b"\xc3\x01"
                schema, body = self.schemas[value[2:10]], io.BytesIO(value[10:])
                fields = schemaless_reader(body, schema)
                assert not body.read(1)
            except Exception:  # noqa: BLE001 - of no sample, whatever it is
                continue
            yield (first.partition, first.offset), schema["name"].removeprefix("rlstreams."), fields

    def _fold_steps(self):
        epoch = last = 0
        bound = None
        for _, name, event in self._events("steps"):
            if name == "TrainerStarted":
                if epoch in (0, event["epoch"] - 1):
                    epoch, config = event["epoch"], json.loads(event["config"])
                    bound = config["trainer"]["max_staleness"]
            elif name == "RunBranched":
                last = last or (0 if epoch else event["step"])
            elif event.get("epoch") != epoch or epoch == 0:
                continue
            elif name == "GroupsDropped":
                for group in event["groups"]:
                    self.dropped.setdefault(group["group_id"], group["reason"])
            elif name == "StepCompleted" and event["step"] == last + 1:
                last = event["step"]
                self.positions = {
                    p["partition"]: p["offset"]
                    for p in event["positions"]
                    if p["topic"] == "scored-trajectories"
                }
                self._take(event, bound)

    def _take(self, event, bound):
        masked = {(m["group_id"], m["sample"], m["segment"]) for m in event["masked"]}
        for ref in event["samples"]:
            name = ref["group_id"], ref["sample"]
            self.twice += name in self.trained
            place = ref["partition"], ref["offset"]
            self.trained.setdefault(name, (place, event["policy_version"] - 1, masked, bound))
            self.closed.add(ref["group_id"])
        for absent in event["absent"]:
            self.absent[absent["group_id"], absent["sample"]] = absent["reason"]

    def _first(self, topic, kind):
        """Of each sample the first record: its place and its event."""
        found = {}
        for place, name, event in self._events(topic):
            if name == kind:
                about = event["trajectory"] if kind == "ScoredTrajectory" else event
                found.setdefault((about["group_id"], about["sample"]), (place, event))
        return found

    def _dead(self):
        """Samples that dead letters name, or whose first record they are about."""
        by_place = {}
        firsts = {"prompts": self.prompts, "trajectories": self.trajectories}
        for topic, found in (firsts | {"scored-trajectories": self.scores}).items():
            by_place |= {(topic, *place): name for name, (place, _) in found.items()}
        dead = set()
        for _, kind, event in self._events("dead-letters"):
            if kind == "DeadLetter":
                name = event["group_id"], event["sample"]
                origin = event["origin_topic"], event["origin_partition"], event["origin_offset"]
                dead.add(name if name[0] else by_place.get(origin))
        return dead

    def _class(self, name):  # noqa: PLR0911 - one for each class
        group = name[0]
        if name in self.trained:
            return "trained"
        if name in self.dead:
            return "dead"
        is_training = NUMBER.fullmatch(group) is not None
        if group in self.closed:
            return "dropped" if self.absent.get(name) else "lost"
        if group in self.dropped:
            return "dropped"
        if not is_training and name in self.trajectories:
            return "evaluated"
        if not self._covers("prompts", self.prompts[name][0]):
            return "in flight"
        if name in self.trajectories and not self._covers(
            "trajectories", self.trajectories[name][0]
        ):
            return "in flight"
        if is_training and name in self.scores:
            partition, offset = self.scores[name][0]
            if offset >= self.positions.get(partition, 0):
                return "in flight"
        return "lost"

    def _covers(self, topic, place):
        low, done = self.done.get((topic, place[0]), (0, set()))
        return place[1] < low or place[1] in done

    def _staleness(self):
        places = {place: event for place, kind, event in self._events("scored-trajectories")}
        tokens = Counter()
        for (group, sample), (place, base, masked, _) in self.trained.items():
            found = places[place]["trajectory"] if place in places else {}
            if (found.get("group_id"), found.get("sample")) != (group, sample):
                continue  # retention took it, or the step names a place that is not its sample's
            for index, segment in enumerate(found["segments"]):
                num_tokens = segment["token_ids"]["shape"][0]
                is_masked = (group, sample, index) in masked
                if segment["author"] == "policy" and num_tokens and not is_masked:
                    tokens[base - segment["policy_version"]] += num_tokens
        return tokens
