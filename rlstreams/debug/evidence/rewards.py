"""The rewards of trained samples checked against the run's own grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlstreams.debug.evidence.findings import REWARDS, FactCheck
from rlstreams.debug.rejudge.rejudge import Grader, NewOutcome, files_of, grader_of, rejudge
from rlstreams.schemas.calls import REWARD
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.run.run_log import RunLog
from rlstreams.words.spelling import Spelling
from rlstreams.words.texts import short
from rlstreams.workers.config.reward import JUDGE, RewardSection
from rlstreams.workers.config.run import RunConfig

CLOSE = 1e-6  # of rewards: a sum of parts in another order
Trained = Mapping[SampleId, tuple[int, float]]
"""Step and reward of each trained sample, by its name."""


def check_rewards(
    log: RunLog,
    config: RunConfig,
    trained: Trained,
    recorded: Mapping[str, str],
    spelled: Spelling,
    say: Callable[[str], None],
) -> FactCheck:
    """Judge the samples again; differing ones twice, which exposes a grader that draws lots.

    Args:
        recorded: hashes of the grader's files when the run was made, as its claim has them.
        spelled: makes text of answers.
    """
    check = FactCheck(name=REWARDS)
    if why := _why_not(config.reward, spelled):
        check.unchecked[why] = len(trained)
        return check
    try:
        with grader_of(config.reward, "", "", ()) as grader:
            check.note = _changed_files(config.reward, recorded)
            _judge(check, log, config, trained, grader, spelled, say)
    except ConfigError as err:
        check.unchecked[str(err)] = len(trained)
    return check


def _why_not(section: RewardSection, spelled: Spelling) -> str:
    if not spelled.hash:
        return "there is no tokenizer in the model folder, so nobody can say what was answered"
    if JUDGE in section.verifiers:
        return "a model behind a server judged them; `rlstreams replay judge` asks it again"
    return ""


def _changed_files(section: RewardSection, recorded: Mapping[str, str]) -> str:
    now = files_of(section).items()
    other = sorted(path for path, sha in now if recorded.get(path, sha) != sha)
    return f"the grader's {', '.join(other)} is another file than the run had" if other else ""


def _judge(
    check: FactCheck,
    log: RunLog,
    config: RunConfig,
    trained: Trained,
    grader: Grader,
    spelled: Spelling,
    say: Callable[[str], None],
) -> None:
    def judged(names: Mapping[SampleId, object]) -> dict[SampleId, NewOutcome]:
        groups = frozenset(group for group, _ in names)
        found = rejudge(log, grader, spelled.plain, config.trainer, groups)
        return {one.sample: one for one in found.outcomes if one.sample in names}

    say(f"judges {len(trained):,} answers again")
    first = judged(trained)
    differ = {n: one for n, one in first.items() if _gap(one, trained[n]) > CLOSE}
    second = judged(differ) if differ else {}
    drawn = [n for n, one in differ.items() if n in second and second[n].event.reward
             != one.event.reward]  # fmt: skip
    for name, (step, reward) in trained.items():
        one = first.get(name)
        if one is None:
            check.unchecked["its session or answer is not in the log, or was not judged"] += 1
        elif one.event.kind != REWARD:
            check.unchecked[f"no reward now: {short(one.event.note)}"] += 1
        elif name not in differ:
            check.num_agreed += 1
        elif drawn:
            check.unchecked[_lots(drawn[0], first, second)] += 1
        else:
            said = f"{reward:g} recorded, the grader says {one.event.reward:g} of"
            check.add(step, name, f"{said} {short(one.text)!r}")


def _lots(
    name: SampleId, first: Mapping[SampleId, NewOutcome], second: Mapping[SampleId, NewOutcome]
) -> str:
    said = f"{first[name].event.reward:g}, then {second[name].event.reward:g}"
    return f"the grader draws lots: of {name} it says {said}"


def _gap(one: NewOutcome, trained: tuple[int, float]) -> float:
    return abs(one.event.reward - trained[1]) if one.event.kind == REWARD else 0.0
