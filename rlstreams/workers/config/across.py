"""Checks of several sections of a configuration together, and the reward with its judge. Pure.

In a problem `[section.field]` stands for the field's name and value (`checks.worded`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.workers.config.agents import agent_problems, late_problems, outcome_problems
from rlstreams.workers.config.checks import refuse_first
from rlstreams.workers.config.loss import UNCOMPARED, WITHOUT_GROUPS, LossSection
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.reward import (
    ENVIRONMENT,
    JudgeSection,
    RewardSection,
    judge_problems,
    judged_by_server,
    shared_judge_problems,
)
from rlstreams.workers.config.run import AUTO, START, RunConfig
from rlstreams.workers.config.trainer import TrainerSection

_UNWEIGHTED: dict[str, object] = {  # importance weights of 1
    "correction": "none",
    "rejection": "none",
    "veto_low": 0.0,
    "veto_high": 0.0,
    "weight_normalize": False,
    "off_policy_max": 0.0,
}
MIN_TEMPERATURE = 1e-6  # logits divided by less overflow float32, and the step with them
GSPO_STALE_CLIP = 0.01  # below it one version of staleness alone clips most samples
GROUP_DEADLINES = 2.0  # of a group, at least, in those of a sample


def judging(config: RunConfig) -> RewardSection:
    """`[reward]` with the server of the run's judge, and with patience for the server's shifts."""
    device = config.shared_device("judge")
    away_s = 0.0 if device is None else device.others_s
    return judged_by_server(config.reward, config.judge, away_s)


def check_across(config: RunConfig) -> None:
    """Check that the sections go together.

    Raises:
        ConfigError: names both fields and their values.
    """
    for problems in (_sample_problems, _engine_problems, _place_problems, _device_problems):
        refuse_first(problems(config), config)


def _sample_problems(config: RunConfig) -> Iterator[str]:
    trainer, prompts, rollout = config.trainer, config.prompts, config.rollout
    if trainer.min_group_samples > prompts.group_size:
        yield (
            "[trainer.min_group_samples], but [prompts.group_size]: no group could be trained; "
            "lower the one, or raise the other"
        )
    if prompts.evaluate_every and not config.data.has_held_out:
        yield (
            "[prompts.evaluate_every], but data.held_out is empty: there is nothing to evaluate "
            "on; name a file, or set data.held_out_rows or data.held_out_fraction"
        )
    if trainer.routing_replay and not rollout.capture_experts:
        yield (
            "[trainer.routing_replay], but [rollout.capture_experts]: no routes would be recorded; "
            "set it to true"
        )
    environment = config.environment
    yield from agent_problems(
        config.agent,
        gateway=config.gateway,
        workers=rollout.workers,
        reward=config.reward,
        environment=environment,
        data=config.data,
        deadline_s=rollout.sample_deadline_s,
    )
    yield from judge_problems(config.reward, config.judge)
    yield from outcome_problems(config.outcome, has_agents=bool(config.agent))
    if config.reward.verifier == ENVIRONMENT and not environment.name:
        yield "[reward.verifier], but environment.name is empty: nobody would give a reward"
    if environment.name and environment.timeout_s >= rollout.sample_deadline_s:
        yield (
            "[environment.timeout_s], but [rollout.sample_deadline_s]: a step that hangs would be "
            "blamed on the sample; set a shorter limit of a step"
        )


def _engine_problems(config: RunConfig) -> Iterator[str]:
    rollout, num_urls = config.rollout, len(config.engine.urls)
    if 0 < num_urls < rollout.workers:
        yield (
            f"engine.urls names {num_urls} servers, but [rollout.workers]: a server belongs to one "
            "worker"
        )
    starts_none = (bool(num_urls) or not config.num_servers) and not config.judge.model
    if starts_none and any(kill.role == "server" for kill in config.demo.kills):
        yield "demo.kills names role 'server', but this run starts no model server: leave it out"
    for name in ("rollout.temperature", "prompts.evaluate_temperature"):
        section, _, field = name.partition(".")
        if rollout.engine == "vllm" and getattr(getattr(config, section), field) > 2:
            yield f"[{name}], but vLLM takes at most 2"
    if rollout.engine == "sglang" and (rollout.top_p < 1 or rollout.top_k):
        yield (
            "rollout.top_p and rollout.top_k must be off (1 and 0) with rollout.engine = 'sglang': "
            "it reports log-probs of the uncut distribution, not of the one that it samples from; "
            "'vllm' and 'builtin' report those of the cut one"
        )


def _place_problems(config: RunConfig) -> Iterator[str]:
    """Check that every log-prob that the loss asks for is computed, and by one role alone."""
    logprob, loss = config.logprob, config.trainer.loss
    if logprob.reference != START and not loss.why_compared:
        yield (
            "[logprob.reference], but [trainer.loss.kl_coef]: nothing would be kept close to it; "
            f"set trainer.loss.kl_coef, or leave it at {START!r}; a teacher needs "
            'trainer.loss.kind = "distill"'
        )
    if logprob.place == "trainer" and loss.proximal != "step_start":
        yield (
            "[logprob.place], but [trainer.loss.proximal]: the trainer holds no weights but its "
            'own; set "step_start", which are those before a step\'s first update'
        )
    if logprob.place == "off" and loss.proximal not in ("behavior", "interpolated"):
        yield (
            "[logprob.place], but [trainer.loss.proximal]: nobody computes these log-probs; set "
            '"behavior", the sampler\'s own, or "interpolated", from them to the policy'
        )


def _device_problems(config: RunConfig) -> Iterator[str]:
    """Check the roles that share a GPU, the way of weights to it, and ranks of other hosts."""
    if config.trainer.hosts and not config.weights.secret:
        yield (
            f"trainer.hosts is {list(config.trainer.hosts)}, but weights.secret is empty: whoever "
            "reaches a rank could command it; set it to env:NAME or file:PATH, the same on each"
        )
    for number, device in enumerate(config.devices):
        if device.name == config.run.id:
            yield f"devices.name is {device.name!r}, as run.id is: a device needs another name"
        for other in config.devices[:number]:
            taken: dict[str, set[str]] = {
                "name": {device.name} & {other.name},
                "roles": {*map(str, device.roles)} & {*map(str, other.roles)},
                "gpus": {*map(str, device.gpus)} & {*map(str, other.gpus)},
            }
            for what, found in taken.items():
                if found:
                    yield (
                        f"devices.{what} names {min(found)!r} twice, in {other.name!r} "
                        f"and in {device.name!r}: each name, role and GPU belongs to one device"
                    )
        yield from _sharing_problems(config, device)


def _sharing_problems(config: RunConfig, device: Device) -> Iterator[str]:
    shares = f"but the role shares device {device.name!r}"
    for role in device.roles:
        section = getattr(config, role)
        if isinstance(section, JudgeSection):
            yield from shared_judge_problems(section, device)
            continue
        if getattr(section, "workers", 1) > 1:
            more = ", and engine.servers for several servers" if role == "rollout" else ""
            yield (
                f"[{role}.workers], {shares}: one worker of a role has shifts; set it to 1{more}"
            )
        if role == "rollout" and config.engine.urls:
            yield (
                f"engine.urls names {len(config.engine.urls)} servers, {shares}: when its worker "
                "dies, nobody has them give their memory up; leave it empty, and `up` starts them"
            )
        if role == "rollout" and config.is_served:
            continue  # a server chooses its own
        allowed = [f"cuda:{gpu}" for gpu in device.gpus] or ["cpu"]
        name = {"cuda": "cuda:0", AUTO: allowed[0]}.get(section.device, section.device)
        if name not in allowed:
            yield (
                f"[{role}.device], {shares}, which has gpus {list(device.gpus)}: set {role}.device "
                f"to {allowed[0]!r}"
            )
        first, ranks = int(name.partition(":")[2] or 0), getattr(section, "ranks", 1)
        behind = {gpu for gpu in range(first, first + ranks) if device.gpus} - {*device.gpus}
        if behind:
            yield (
                f"[{role}.ranks] from {name!r} on, {shares}, which has gpus {list(device.gpus)}: "
                f"add {sorted(behind)} to devices.gpus"
            )
    if "logprob" in device.roles and not config.has_scorer:
        yield f"[logprob.place], {shares}: it holds no model there; leave it out of devices.roles"
    is_copied = config.weights.is_link and config.weights.snapshot == "device"
    if "trainer" in device.roles and is_copied:
        yield f"[weights.snapshot], {shares}, where nothing of it stays: set 'pinned' or 'auto'"


def check_start(config: RunConfig) -> None:
    """Refuse settings with which a run would learn nothing, or something else than was meant.

    A recorded configuration is exempt: its run exists.

    Raises:
        ConfigError: names the field, its value and what to set.
    """
    refuse_first(_start_problems(config), config)


def _start_problems(config: RunConfig) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    if rollout.temperature < MIN_TEMPERATURE:
        yield (
            "[rollout.temperature]: the likeliest token has no probability to learn from, and the "
            f"trainer would refuse every sample; set at least {MIN_TEMPERATURE:g}, 1 is usual"
        )
    yield from without_effect(config)
    has_baseline = trainer.loss.advantage not in WITHOUT_GROUPS
    is_lone = config.prompts.group_size == 1 and trainer.loss.lone == "zero"
    is_lone &= not trainer.loss.has_own_advantage
    if is_lone and has_baseline:
        yield (
            "[prompts.group_size]: a sample without siblings has nothing to be compared with, its "
            "advantage is 0 and nothing would be learnt; set at least 2, or "
            'trainer.loss.lone = "reward" to learn from the bare reward'
        )
    if is_lone and not has_baseline and trainer.equal_rewards == "drop":
        yield (
            "[trainer.equal_rewards], but [prompts.group_size]: the rewards of a group of one are "
            'equal, so each would be dropped; set trainer.equal_rewards to "keep"'
        )
    yield from late_problems(config.outcome, trainer.group_deadline_s, rollout.sample_deadline_s)
    least_s = GROUP_DEADLINES * rollout.sample_deadline_s
    if trainer.group_deadline_s < least_s:
        yield (
            "[trainer.group_deadline_s], but [rollout.sample_deadline_s]: a group's clock starts "
            "with its first scored sample, so one slow sample would drop its finished siblings; "
            f"set at least {least_s:g}, or a shorter deadline of a sample"
        )


def without_effect(config: RunConfig) -> Iterator[str]:
    """Why clipping, correction or a penalty would do nothing, though it looks as if it did."""
    trainer, loss = config.trainer, config.trainer.loss
    is_corrected = loss.correction != "none" or loss.rejection != "none" or loss.veto_low
    if loss.weight_cap < 1 and loss.correction != "none":
        yield (
            "[trainer.loss.weight_cap], below 1: tokens on which sampler and trainer agree would "
            "be cut as well; set at least 1, 2 is usual"
        )
    if loss.proximal == "behavior" and (is_corrected or loss.veto_high or loss.weight_normalize):
        yield (
            "[trainer.loss.proximal]: proximal / behavior is 1 for every token, so truncation, "
            "masks, rejection and normalisation would correct nothing; set "
            'trainer.loss.correction = "none" and leave the others off'
        )
    if loss.kind == "sft":
        yield from _sft_problems(loss)
    if loss.kind == "distill" and config.logprob.reference == START:
        yield (
            "[trainer.loss.kind], but [logprob.reference]: the model would be its own teacher; "
            "name the teacher's folder, or hf:ORG/NAME"
        )
    yield from _advantage_problems(trainer)
    if loss.proximal == "interpolated" and loss.weight_normalize:
        yield (
            "[trainer.loss.weight_normalize], but with trainer.loss.proximal 'interpolated' "
            "weights are known only as a micro-batch is computed: set 'step_start'"
        )
    if loss.kl_weight != "none" and not loss.kl_coef:
        yield (
            "[trainer.loss.kl_weight], but [trainer.loss.kl_coef]: there is no divergence to weigh"
        )
    longest = config.num_turns * config.rollout.max_new_tokens
    if loss.overlong_tokens and loss.overlong_tokens - loss.overlong_buffer_tokens >= longest:
        yield (
            "[trainer.loss.overlong_tokens] and [trainer.loss.overlong_buffer_tokens], but an "
            f"answer has at most {longest} tokens: no length would be punished"
        )


def _advantage_problems(trainer: TrainerSection) -> Iterator[str]:
    """Why the policy would learn nothing, or nothing from rewards."""
    loss = trainer.loss
    if 0 < trainer.steps <= loss.value_warmup_steps:
        yield (
            "[trainer.loss.value_warmup_steps], but [trainer.steps]: the policy would never learn"
        )
    if loss.advantage == "maxrl" and loss.overlong_tokens:
        yield (
            "[trainer.loss.advantage] and [trainer.loss.overlong_tokens]: 'maxrl' is defined for "
            "rewards of 0 or more, and the first wrong answer that is too long would have less; "
            "set trainer.loss.overlong_tokens to 0, or another advantage"
        )
    if loss.advantage == "one" and not loss.reward_min:
        if loss.kind not in ("sft", "distill") and not loss.has_own_kind:
            yield (
                f"[trainer.loss.advantage] with trainer.loss.kind {loss.kind!r} and "
                "trainer.loss.reward_min 0: good and bad answers would count alike; set "
                'kind = "sft", or reward_min'
            )
        if trainer.control == "permuted":
            yield (
                "[trainer.control], but with trainer.loss.advantage 'one' and "
                'trainer.loss.reward_min 0 no reward counts; set reward_min, or control to "none"'
            )


def _sft_problems(loss: LossSection) -> Iterator[str]:
    """Problems of settings of a likelihood, which has neither ratio nor importance weight."""
    if loss.advantage not in UNCOMPARED and not loss.has_own_advantage:
        yield (
            "trainer.loss.kind is 'sft', but [trainer.loss.advantage], which is below 0 for some: "
            'set "one", with reward_min to learn from good answers alone, or "reward"'
        )
    for name, off in _UNWEIGHTED.items():
        if getattr(loss, name) != off:
            yield (
                f"[trainer.loss.{name}], but trainer.loss.kind 'sft' learns from answers whoever "
                f"sampled them: set {off!r}"
            )
    if loss.proximal in ("step_start", "interpolated"):
        yield (
            "[trainer.loss.proximal], but trainer.loss.kind 'sft' has no ratio: set "
            '"behavior", or "sampled" for metrics of the mismatch'
        )


def length_warning(config: RunConfig, longest: int | None) -> str:
    """Warn if a sample may need more than a micro-batch; "": it does not.

    Args:
        longest: tokens of the model's longest sequence, which ends a sample; None: any number.
    """
    turns, each = config.num_turns, config.rollout.max_new_tokens
    budget = config.trainer.micro_batch_tokens
    sampled = turns * each if longest is None else min(turns * each, longest)
    if sampled < budget or (longest is not None and longest <= budget):
        return ""
    room = ", the model's longest sequence" if sampled == longest else ""
    field = "the most of agent.max_calls" if config.agent else "environment.max_turns"
    several = f"{field} is {turns} and " if turns > 1 else ""
    return (
        f"{several}rollout.max_new_tokens is {each}: a sample may have "
        f"{sampled:,} tokens{room}, but trainer.micro_batch_tokens is {budget}. "
        "One that is longer, its prompt included, is a micro-batch of its own, and takes the "
        "memory of its length; a sample that finds none is dropped, reason memory"
    )


def start_warning(config: RunConfig) -> str:
    """Warn of sampling settings that a run can start with and should not; "": there are none."""
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k:
        return (
            f"rollout.top_p is {rollout.top_p:g} and rollout.top_k is {rollout.top_k}: the "
            "sampler's log-probs are of the cut distribution, the scorer's of the whole one, so "
            "each importance weight is off by the share that was kept and the gradient is biased; "
            "set both off (1 and 0) to train"
        )
    return ""


def loss_warnings(config: RunConfig) -> Iterator[str]:
    """Warn of bounds that bound nothing, or clip by staleness alone, and of groups that are dropped
    though they teach."""
    trainer, loss = config.trainer, config.trainer.loss
    once = trainer.minibatches * trainer.batch_epochs == 1
    is_bounding = loss.kind not in ("m2po", "distill") and not loss.has_own_kind
    is_separate = config.logprob.place == "separate"  # elsewhere there is nothing better to take
    if loss.proximal == "step_start" and once and is_bounding and is_separate:
        yield (
            "trainer.loss.proximal is 'step_start' with one update of a batch: policy / proximal "
            f"is 1 in it, so trainer.loss.kind {loss.kind!r} bounds nothing, only the importance "
            "weight does; set trainer.minibatches above 1, or logprob.place to 'trainer', because "
            "the loss does not read the log-prob worker's scores"
        )
    if trainer.equal_rewards == "drop" and loss.advantage in WITHOUT_GROUPS:
        yield (
            f"trainer.equal_rewards is 'drop', but trainer.loss.advantage is {loss.advantage!r}: "
            "it does not compare within the group, so groups of equal rewards, which are dropped, "
            'would teach; "keep" keeps them'
        )
    least = min(loss.clip_low, loss.clip_high)
    holds_staleness = loss.proximal != "step_start" and trainer.max_staleness > 0
    if loss.kind != "gspo" or not holds_staleness or least >= GSPO_STALE_CLIP:
        return
    yield (
        f"trainer.loss.clip_low is {loss.clip_low:g} and trainer.loss.clip_high is "
        f"{loss.clip_high:g}: bounds of this size are GSPO's for the ratio to the step's start. "
        f"With trainer.loss.proximal {loss.proximal!r} and trainer.max_staleness "
        f"{trainer.max_staleness} the ratio holds the samples' staleness, by which alone more than "
        "half of the tokens would be clipped; set them to 0.03 and 0.04, or proximal to "
        "'step_start' with trainer.minibatches above 1"
    )
