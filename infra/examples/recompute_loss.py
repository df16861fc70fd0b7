"""Loss of a run's first steps, recomputed from its log in plain torch and compared with the log's.

None of our training code is used. It begins with the model folder, whose weights are version 0, and
assumes the defaults `kind = "ppo"` and `reduce = "token"`:

    python infra/examples/recompute_loss.py RUN
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from rlstreams import open_run
from rlstreams.schemas import ScoredTrajectory

NUM_STEPS = 2
torch.set_num_threads(1)


def policy_logprobs(model, scored):
    """Log-probs of each policy segment's tokens under `model`, nats."""
    segments = scored.trajectory.segments
    ids = torch.cat([torch.tensor(s.token_ids.numpy()) for s in segments]).long()
    logits = model(ids[None]).logits[0, :-1].float()  # those at t are about token t + 1
    found, start = {}, 0
    for number, segment in enumerate(segments):
        end = start + len(segment.token_ids)
        if segment.author == "policy" and start < end:
            rows = (logits[start - 1 : end - 1] / segment.temperature).log_softmax(-1)
            found[number] = rows.gather(1, ids[start:end, None])[:, 0]
        start = end
    return found


def token_losses(policy, proximal, behavior, advantage, by):
    """Clipped PPO against the version that sampled, weighed for the engine's mismatch."""
    weight = (proximal - behavior).exp().clamp(max=by["weight_cap"])
    ratio = (policy - proximal).exp()
    clipped = ratio.clamp(1 - by["clip_low"], 1 + by["clip_high"])
    least = torch.minimum(ratio * advantage, clipped * advantage)
    if advantage < 0:
        least = least.clamp(min=by["clip_dual"] * advantage)
    return -weight * least


with open_run(sys.argv[1]) as log:
    config = log.configuration
    steps = [step for step in log.steps() if step.step <= NUM_STEPS]
    used = {(ref.partition, ref.offset) for step in steps for ref in step.samples}
    places = ((r.position[1:], r.event) for r in log.read(ScoredTrajectory))
    scored_at = {place: event for place, event in places if place in used}

model = AutoModelForCausalLM.from_pretrained(config["model"]["path"], dtype=torch.float32).eval()
by, adam = config["trainer"]["loss"], config["trainer"]["optimizer"]
optimizer = torch.optim.AdamW(
    model.parameters(),
    betas=(adam["beta1"], adam["beta2"]),
    eps=adam["eps"],
    weight_decay=adam["weight_decay"],
)
for step in steps:
    masked = {(m.group_id, m.sample, m.segment) for m in step.masked}
    losses = []
    for ref in step.samples:
        scored = scored_at[ref.partition, ref.offset]
        policy = policy_logprobs(model, scored)
        for score in scored.scores:
            if score.segment in policy and (ref.group_id, ref.sample, score.segment) not in masked:
                segment = scored.trajectory.segments[score.segment]
                proximal = torch.tensor(score.proximal_logprobs.numpy())
                behavior = torch.tensor(segment.behavior_logprobs.numpy())
                anchors = proximal, behavior, ref.advantage
                losses.append(token_losses(policy[score.segment], *anchors, by))
    loss = torch.cat(losses).mean()
    print(f"step {step.step}: recorded {step.loss:.9f}, recomputed {loss.item():.9f}")
    assert abs(loss.item() - step.loss) < 1e-5
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), adam["max_grad_norm"])
    for group in optimizer.param_groups:
        group["lr"] = adam["lr"] * min(1, step.step / max(adam["warmup_steps"], 1))
    optimizer.step()
    optimizer.zero_grad()
