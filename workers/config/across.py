"""Checks between sections of a configuration, and warnings of a start. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.loss import UNCOMPARED, WITHOUT_GROUPS, LossSection
from rlstreams.workers.config.operation import Device
from rlstreams.workers.config.reward import ENVIRONMENT
from rlstreams.workers.config.run import START, RunConfig
from rlstreams.workers.config.trainer import MEGATRON, TrainerSection

_UNWEIGHTED: dict[str, object] = {  # importance weights of 1
    "correction": "none",
    "rejection": "none",
    "veto_low": 0.0,
    "veto_high": 0.0,
    "weight_normalize": False,
    "off_policy_max": 0.0,
}
MIN_TEMPERATURE = 1e-6  # logits divided by less overflow float32, and the step with them
GROUP_DEADLINES = 2.0  # of a group, at least, in those of a sample


def check_across(config: RunConfig) -> None:
    """What one section asks of another.

    Raises:
        ConfigError: names both fields and their values.
    """
    trainer, prompts, longest = config.trainer, config.prompts, config.rollout.max_new_tokens
    if trainer.min_group_samples > prompts.group_size:
        raise ConfigError(
            f"trainer.min_group_samples is {trainer.min_group_samples}, "
            f"but prompts.group_size is {prompts.group_size}: no group could be trained"
        )
    if prompts.evaluate_every and not config.data.has_held_out:
        raise ConfigError(
            f"prompts.evaluate_every is {prompts.evaluate_every}, "
            "but data.held_out is empty: there is nothing to evaluate on; name a file, or set "
            "data.held_out_rows or data.held_out_fraction"
        )
    if 0 < len(config.engine.urls) < config.rollout.workers:
        raise ConfigError(
            f"engine.urls names {len(config.engine.urls)} servers, but rollout.workers is "
            f"{config.rollout.workers}: a server belongs to one worker"
        )
    for check in (_check_environment, _check_place, _check_devices):
        check(config)
    temperatures = {
        "rollout.temperature": config.rollout.temperature,
        "prompts.evaluate_temperature": prompts.evaluate_temperature,
    }
    for name, temperature in temperatures.items():
        if config.rollout.engine == "vllm" and temperature > 2:
            raise ConfigError(f"{name} is {temperature}, but vLLM takes at most 2")
    if config.rollout.engine == "sglang" and (config.rollout.top_p < 1 or config.rollout.top_k):
        raise ConfigError(
            "rollout.top_p and rollout.top_k must be off with rollout.engine = 'sglang': it "
            "reports log-probs of the uncut distribution, not of the one that it samples from"
        )
    if config.logprob.reference != START and not trainer.loss.why_compared:
        raise ConfigError(
            f"logprob.reference is {config.logprob.reference!r}, but trainer.loss.kl_coef is 0: "
            "nothing would be kept close to it; set trainer.loss.kl_coef, or leave it at "
            f'{START!r}; a teacher needs trainer.loss.kind = "distill"'
        )
    if trainer.routing_replay and not config.rollout.capture_experts:
        raise ConfigError(
            "trainer.routing_replay is true, but rollout.capture_experts is false: no routes would "
            "be recorded; set it to true"
        )
    # Of several turns, `length_warning`: it takes the model's longest sequence to know.
    if trainer.micro_batch_tokens <= longest:
        raise ConfigError(
            f"trainer.micro_batch_tokens is {trainer.micro_batch_tokens}, "
            f"but rollout.max_new_tokens is {longest}: the longest sample would fit no micro-batch"
        )


def _check_environment(config: RunConfig) -> None:
    environment, rollout = config.environment, config.rollout
    if config.reward.verifier == ENVIRONMENT and not environment.name:
        raise ConfigError(
            f"reward.verifier is {ENVIRONMENT!r}, but environment.name is empty: nobody would give "
            "a reward"
        )
    if environment.name and environment.timeout_s >= rollout.sample_deadline_s:
        raise ConfigError(
            f"environment.timeout_s is {environment.timeout_s:g}, but rollout.sample_deadline_s is "
            f"{rollout.sample_deadline_s:g}: a step that hangs would be blamed on the sample; set "
            "a shorter limit of a step"
        )


def _check_place(config: RunConfig) -> None:
    """Every log-prob that the loss asks for is computed by somebody, and by one alone."""
    place, loss = config.logprob.place, config.trainer.loss
    told = f"logprob.place is {place!r}, but trainer.loss"
    if place == "trainer" and loss.proximal != "step_start":
        raise ConfigError(
            f"{told}.proximal is {loss.proximal!r}: the trainer holds no weights but its own; set "
            '"step_start", which are those before a step\'s first update'
        )
    if place == "off" and loss.proximal not in ("behavior", "interpolated"):
        raise ConfigError(
            f"{told}.proximal is {loss.proximal!r}: nobody computes these log-probs; set "
            '"behavior", the sampler\'s own, or "interpolated", from them to the policy'
        )
    if place != "separate" and loss.why_compared:
        raise ConfigError(
            f"logprob.place is {place!r}, but {loss.why_compared}: nobody computes log-probs of "
            'the reference; set logprob.place to "separate"'
        )
    if loss.why_compared and config.logprob.ranks > 1:
        raise ConfigError(
            f"{loss.why_compared} with logprob.ranks {config.logprob.ranks}: "
            "the reference would lie whole on rank 0; set logprob.ranks to 1"
        )
    if loss.distill_top_k and config.logprob.backend == MEGATRON:
        raise ConfigError(
            f"trainer.loss.distill_top_k is {loss.distill_top_k} with logprob.backend "
            f"{MEGATRON!r}, which gives the sampled token's log-prob alone: set logprob.backend to "
            '"builtin", or trainer.loss.distill_top_k to 0'
        )
    if config.logprob.backend == MEGATRON and config.logprob.ranks > 1:
        raise ConfigError(
            f"logprob.ranks is {config.logprob.ranks} with logprob.backend {MEGATRON!r}, which "
            'scores in one process: set logprob.ranks to 1, or logprob.backend to "builtin"'
        )


def _check_devices(config: RunConfig) -> None:
    """Who shares a GPU, with whom, and by what means weights come to it."""
    devices = config.devices
    for number, device in enumerate(devices):
        if device.name == config.run.id:
            raise ConfigError(
                f"devices.name is {device.name!r}, as run.id is: a device needs another name"
            )
        for other in devices[:number]:
            taken: dict[str, set[str]] = {
                "name": {device.name} & {other.name},
                "roles": {*map(str, device.roles)} & {*map(str, other.roles)},
                "gpus": {*map(str, device.gpus)} & {*map(str, other.gpus)},
            }
            for what, found in taken.items():
                if found:
                    raise ConfigError(
                        f"devices.{what} names {min(found)!r} twice, in {other.name!r} "
                        f"and in {device.name!r}: each name, role and GPU belongs to one device"
                    )
        _check_device(config, device)


def _check_device(config: RunConfig, device: Device) -> None:
    workers = {"rollout": config.rollout.workers, "logprob": config.logprob.workers}
    own_device = {
        "rollout": config.rollout.device,
        "logprob": config.logprob.device,
        "trainer": config.trainer.device,
    }
    for role in device.roles:
        if workers.get(role, 1) > 1:
            raise ConfigError(
                f"{role}.workers is {workers[role]}, but the role shares device {device.name!r}: "
                "one worker of a role takes turns; set it to 1"
            )
        if role == "rollout" and config.engine.urls:
            raise ConfigError(
                f"engine.urls names {len(config.engine.urls)} servers, but rollout shares device "
                f"{device.name!r}: when its worker dies, nobody has them give their memory up; "
                "leave it empty, and the worker starts its own"
            )
        if role == "rollout" and config.rollout.engine != "builtin":
            continue  # a server chooses its own
        allowed = [f"cuda:{gpu}" for gpu in device.gpus] or ["cpu"]
        name = "cuda:0" if own_device[role] == "cuda" else own_device[role]
        if name not in allowed:
            raise ConfigError(
                f"{role}.device is {own_device[role]!r}, but device {device.name!r} that the role "
                f"shares has gpus {list(device.gpus)}: set {role}.device to {allowed[0]!r}"
            )
    _check_gives_up(config, device)
    if "trainer" not in device.roles:
        return
    if config.weights.channel != "file" and config.weights.snapshot == "device":
        raise ConfigError(
            f"weights.snapshot is {config.weights.snapshot!r}, but the trainer shares device "
            f"{device.name!r}, where nothing of it stays: set it to 'pinned' or 'auto'"
        )


def _check_gives_up(config: RunConfig, device: Device) -> None:
    """Who shares a device must be able to leave its memory."""
    trainer, logprob = config.trainer, config.logprob
    wanted: dict[str, tuple[object, object]] = {
        "trainer.ranks": (trainer.ranks, 1),
        "trainer.backend": (trainer.backend, "fsdp2"),
        "logprob.ranks": (logprob.ranks, 1),
        "logprob.backend": (logprob.backend, "builtin"),
    }
    if "logprob" in device.roles and logprob.place != "separate":
        raise ConfigError(
            f"logprob.place is {logprob.place!r}, but logprob shares device {device.name!r}: it "
            "holds no model there; leave it out of devices.roles"
        )
    for name, (value, only) in wanted.items():
        if name.partition(".")[0] in device.roles and value != only:
            raise ConfigError(
                f"{name} is {value!r}, but its role shares device {device.name!r}: only with "
                f"{only!r} does it give its memory up"
            )


def check_start(config: RunConfig) -> None:
    """What lets a run start and then learn nothing, or something else than was meant.

    A recorded configuration is not held to it: what it made is there.

    Raises:
        ConfigError: names the field, its value and what to set.
    """
    trainer, rollout = config.trainer, config.rollout
    if rollout.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"rollout.temperature is {rollout.temperature:g}: the likeliest token has no "
            "probability to learn from, and the trainer would refuse every sample; set at least "
            f"{MIN_TEMPERATURE:g}, 1 is usual"
        )
    if problem := next(without_effect(config), ""):
        raise ConfigError(problem)
    has_baseline = trainer.loss.advantage not in WITHOUT_GROUPS
    if config.prompts.group_size == 1 and trainer.loss.lone == "zero" and has_baseline:
        raise ConfigError(
            "prompts.group_size is 1: a sample without siblings has nothing to be compared with, "
            "its advantage is 0 and nothing would be learnt; set at least 2, or "
            'trainer.loss.lone = "reward" to learn from the bare reward'
        )
    least_s = GROUP_DEADLINES * rollout.sample_deadline_s
    if trainer.group_deadline_s < least_s:
        raise ConfigError(
            f"trainer.group_deadline_s is {trainer.group_deadline_s:g}, but "
            f"rollout.sample_deadline_s is {rollout.sample_deadline_s:g}: a group's clock starts "
            "with its first scored sample, so one slow sample would drop its finished siblings; "
            f"set at least {least_s:g}, or a shorter deadline of a sample"
        )


def without_effect(config: RunConfig) -> Iterator[str]:
    """Why clipping, correction or a penalty would do nothing, though it looks as if it did."""
    trainer, loss = config.trainer, config.trainer.loss
    is_corrected = loss.correction != "none" or loss.rejection != "none" or loss.veto_low
    if loss.weight_cap < 1 and loss.correction != "none":
        yield (
            f"trainer.loss.weight_cap is {loss.weight_cap:g}, below 1: tokens on which sampler and "
            "trainer agree would be cut as well; set at least 1, 2 is usual"
        )
    if loss.proximal == "behavior" and (is_corrected or loss.veto_high or loss.weight_normalize):
        yield (
            "trainer.loss.proximal is 'behavior': proximal / behavior is 1 for every token, so "
            "truncation, masks, rejection and normalisation would correct nothing; set "
            'trainer.loss.correction = "none" and leave the others off'
        )
    if loss.kind == "sft":
        yield from _sft_problems(loss)
    if loss.kind == "distill" and config.logprob.reference == START:
        yield (
            f"trainer.loss.kind is 'distill', but logprob.reference is {START!r}: the model would "
            "be its own teacher; name the teacher's folder, or hf:ORG/NAME"
        )
    yield from _advantage_problems(trainer)
    once = trainer.minibatches * trainer.batch_epochs == 1
    is_bounding = loss.kind not in ("m2po", "distill")
    is_separate = config.logprob.place == "separate"  # elsewhere there is nothing better to take
    if loss.proximal == "step_start" and once and is_bounding and is_separate:
        yield (
            "trainer.loss.proximal is 'step_start' with trainer.minibatches 1 and "
            "trainer.batch_epochs 1: policy / proximal is 1 in the only update of a batch, so "
            f"trainer.loss.kind {loss.kind!r} would bound nothing; set one of them above 1"
        )
    if loss.proximal == "interpolated" and loss.weight_normalize:
        yield (
            "trainer.loss.weight_normalize is true, but with trainer.loss.proximal 'interpolated' "
            "weights are known only as a micro-batch is computed: set 'step_start'"
        )
    if loss.kl_weight != "none" and not loss.kl_coef:
        yield (
            f"trainer.loss.kl_weight is {loss.kl_weight!r}, but trainer.loss.kl_coef is 0: there "
            "is no divergence to weigh"
        )
    if trainer.equal_rewards == "drop" and loss.advantage in WITHOUT_GROUPS:
        yield (
            f"trainer.equal_rewards is 'drop', but trainer.loss.advantage is {loss.advantage!r}: "
            'it does not compare within the group, so equal rewards do teach; set "keep"'
        )
    longest = config.num_turns * config.rollout.max_new_tokens
    if loss.overlong_tokens and loss.overlong_tokens - loss.overlong_buffer_tokens >= longest:
        yield (
            f"trainer.loss.overlong_tokens is {loss.overlong_tokens} with "
            f"overlong_buffer_tokens {loss.overlong_buffer_tokens}, but an answer has at most "
            f"{longest} tokens: no length would be punished"
        )


def _advantage_problems(trainer: TrainerSection) -> Iterator[str]:
    """Why the policy would learn nothing, or nothing from rewards."""
    loss = trainer.loss
    if 0 < trainer.steps <= loss.value_warmup_steps:
        yield (
            f"trainer.loss.value_warmup_steps is {loss.value_warmup_steps}, but trainer.steps is "
            f"{trainer.steps}: the policy would never learn"
        )
    if loss.advantage == "one" and not loss.reward_min:
        if loss.kind not in ("sft", "distill"):
            yield (
                f"trainer.loss.advantage is 'one' with trainer.loss.kind {loss.kind!r} and "
                "trainer.loss.reward_min 0: nothing would tell a good answer from a bad one; set "
                'kind = "sft", or reward_min'
            )
        if trainer.control == "permuted":
            yield (
                "trainer.control is 'permuted', but with trainer.loss.advantage 'one' and "
                'trainer.loss.reward_min 0 no reward counts; set reward_min, or control to "none"'
            )


def _sft_problems(loss: LossSection) -> Iterator[str]:
    """What a likelihood has no place for: it has neither ratio nor importance weight."""
    if loss.advantage not in UNCOMPARED:
        yield (
            f"trainer.loss.kind is 'sft', but trainer.loss.advantage is {loss.advantage!r}, which "
            'is below 0 for some: set "one", with reward_min to learn from good answers alone, or '
            '"reward"'
        )
    for name, off in _UNWEIGHTED.items():
        if (value := getattr(loss, name)) != off:
            yield (
                f"trainer.loss.{name} is {value!r}, but trainer.loss.kind 'sft' learns from "
                f"answers whoever sampled them: set {off!r}"
            )
    if loss.proximal in ("step_start", "interpolated"):
        yield (
            f"trainer.loss.proximal is {loss.proximal!r}, but trainer.loss.kind 'sft' has no "
            'ratio: set "behavior", or "sampled" for metrics of the mismatch'
        )


def length_warning(config: RunConfig, longest: int | None) -> str:
    """What samples of several turns may need beyond a micro-batch; "": nothing.

    Without an environment `check_across` sees to it.

    Args:
        longest: tokens of the model's longest sequence, which ends a sample; None: any number.
    """
    turns, each = config.num_turns, config.rollout.max_new_tokens
    budget = config.trainer.micro_batch_tokens
    sampled = turns * each if longest is None else min(turns * each, longest)
    if turns == 1 or sampled <= budget:
        return ""
    room = ", the model's longest sequence" if sampled == longest else ""
    return (
        f"environment.max_turns is {turns} and rollout.max_new_tokens is {each}: a sample may have "
        f"{sampled:,} tokens{room}, but trainer.micro_batch_tokens is {budget}. "
        "One that is longer is a micro-batch of its own, and takes the memory of its length; a "
        "sample that finds none is dropped, reason memory"
    )


def start_warning(config: RunConfig) -> str:
    """What a run can be started with and should not; "": nothing."""
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k:
        return (
            f"rollout.top_p is {rollout.top_p:g} and rollout.top_k is {rollout.top_k}: the "
            "sampler's log-probs are of the cut distribution, the scorer's of the whole one, so "
            "each importance weight is off by the share that was kept and the gradient is biased; "
            "set both off (1 and 0) to train"
        )
    return ""
