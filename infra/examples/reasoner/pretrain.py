"""Train the base model from scratch on solutions of `tasks.py`: a Hugging Face folder in minutes.

    python -m infra.examples.reasoner.pretrain --out runs/reasoner-base/model  # a GPU
    python -m infra.examples.reasoner.pretrain --shape tiny --steps 20 --device cpu --out x

Qwen3's architecture, its own tokenizer, bfloat16 with float32 masters. Every solution is right, but
a part of them is the bare answer (`--worked`): of hard problems that cannot be learnt, so the model
guesses them as often. Few documents are hard (`--levels`). Documents lie one behind another in one
row and none sees another; a batch follows from seed and step alone: the same hardware, libraries
and `--steps` give the same bytes. With `checkpoint.pt` in the folder, training continues there.
Axes: `T` token of the row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from infra.examples.reasoner.tasks import LEVELS, TASKS
from rlstreams.workers.model import one_order
from rlstreams.workers.model.documents import Documents, use_documents

# Layers, hidden, heads, heads of keys, width of a head, width of the MLP.
SHAPES = {
    "tiny": (2, 64, 2, 1, 32, 192),
    "0.06b": (8, 768, 6, 3, 128, 2304),
    "0.15b": (12, 1024, 8, 4, 128, 3072),
    "0.4b": (20, 1280, 10, 5, 128, 4096),
}
PAD, USER, ASSISTANT, END = SPECIALS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 512  # rows of the embedding; the pieces are somewhat fewer
MAX_TOKENS = 4096  # that the model is configured for
LONGEST = 1536  # no document has more tokens
TOKENIZER_TEXTS = 20_000
TEXTS_AT_ONCE = 64
LR, WARMUP_STEPS, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-3, 100, (0.9, 0.95), 0.1, 1.0
SHOW_EVERY, CHECKPOINT_EVERY = 50, 1000
CHECKPOINT = "checkpoint.pt"


class Mixture(NamedTuple):
    """Which documents are drawn: a weight for each level, and the worked share of each."""

    levels: Sequence[float]
    worked: Sequence[float]

    def texts(self, seed: str) -> Iterator[str]:
        """Documents without end: prompt, solution, end."""
        rng, makers = random.Random(seed), list(TASKS.values())
        while True:
            level = rng.choices(LEVELS, self.levels)[0]
            problem = rng.choice(makers)(rng, level)
            if not problem.is_held_out:
                solution = problem.solution(is_worked=rng.random() < self.worked[level - 1])
                yield f"{USER}{problem.prompt}{ASSISTANT}{solution}{END}"


class Bins(Dataset[tuple[torch.Tensor, ...]]):
    """The row of each step: ids, weights of the targets, and where its documents lie."""

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture, seed: int, num_tokens: int) -> None:
        self._tokenizer, self._mixture = tokenizer, mixture
        self._seed, self._num_tokens = seed, num_tokens
        self._assistant = tokenizer.token_to_id(ASSISTANT)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, ...]:
        texts = self._mixture.texts(f"bin {self._seed} {step}")
        ids, weights, lengths = list[int](), list[float](), list[int]()
        while True:
            some = [next(texts) for _ in range(TEXTS_AT_ONCE)]
            for encoding in self._tokenizer.encode_batch_fast(some):
                own = encoding.ids
                if len(ids) + len(own) > self._num_tokens:
                    rest = self._num_tokens - len(ids)
                    row = torch.tensor([ids + [0] * rest])
                    weights_T = torch.tensor(weights + [0.0] * rest)
                    documents = Documents.of(lengths, self._num_tokens)
                    places = (documents.positions_1T, documents.starts, documents.extent)
                    return row, weights_T, *places
                prompt = own.index(self._assistant)
                lengths.append(len(own))
                ids += own  # a token's target is the next one: from the mark to the last but one
                weights += [0.0] * prompt + [1.0] * (len(own) - prompt - 1) + [0.0]


def make_tokenizer(mixture: Mixture, seed: int) -> PreTrainedTokenizerFast:
    """Byte pairs of drawn documents; each digit is a piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIALS, initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    texts = mixture.texts(f"tokenizer {seed}")
    tokenizer.train_from_iterator((next(texts) for _ in range(TOKENIZER_TEXTS)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def make_model(shape: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random weights in float32, on the CPU: the same for every device."""
    layers, hidden, heads, kv_heads, head_dim, width = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, max_position_embeddings=MAX_TOKENS, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, dtype="bfloat16", attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()


class Training:
    """A model in 16 bits (float32 on a CPU), its masters, and AdamW over them."""

    def __init__(self, model: Qwen3ForCausalLM, device: str, *, is_compiled: bool) -> None:
        self.masters = [p.detach().clone().to(device) for p in model.parameters()]
        self.model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
        self._params, self._device = list(self.model.parameters()), device
        groups = [
            {"params": [m for m in self.masters if m.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [m for m in self.masters if m.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        self._loss = answer_loss
        self._has_kernel = device != "cpu"
        if self._has_kernel:
            use_documents(self.model)
        if is_compiled:
            from torch._dynamo import config as dynamo
            from torch._inductor import config as inductor

            dynamo.recompile_limit = 64
            inductor.deterministic = True
            self._loss = torch.compile(answer_loss, dynamic=False)
            for layer in self.model.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)

    def loss(self, row: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean over the solutions' tokens, nats."""
        ids_1T, weights_T, positions_1T, starts, extent = row
        documents = Documents(positions_1T, starts, extent).to(self._device)
        inputs = documents.inputs()
        if not self._has_kernel:
            inputs = {"position_ids": positions_1T, "attention_mask": block_mask(positions_1T)}
        ids_1T = ids_1T.to(self._device, non_blocking=True)
        weights_T = weights_T.to(self._device, non_blocking=True)
        hidden_1TD = self.model.model(input_ids=ids_1T, use_cache=False, **inputs).last_hidden_state
        targets_T = ids_1T[0].roll(-1)
        return self._loss(hidden_1TD[0], self.model.lm_head.weight, targets_T, weights_T)

    def step(self, row: tuple[torch.Tensor, ...], lr: float) -> torch.Tensor:
        """One update; the loss before it."""
        loss = self.loss(row)
        one_order.backward(loss)
        for param, master in zip(self._params, self.masters, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.publish()
        return loss.detach()

    @torch.no_grad()
    def publish(self) -> None:
        """Masters, rounded, become the weights."""
        torch._foreach_copy_(self._params, self.masters)

    def save(self, path: Path, figures: dict[str, Any]) -> None:
        """Masters, moments and figures: whole, or not at all."""
        state = {"masters": self.masters, "adam": self.adam.state_dict(), "figures": figures}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """What `save` wrote; its figures."""
        state = torch.load(path, map_location=self._device, weights_only=True)
        with torch.no_grad():
            torch._foreach_copy_(self.masters, state["masters"])
        self.adam.load_state_dict(state["adam"])
        self.publish()
        figures: dict[str, Any] = state["figures"]
        return figures


def answer_loss(
    hidden_TD: torch.Tensor, head: torch.Tensor, targets_T: torch.Tensor, weights_T: torch.Tensor
) -> torch.Tensor:
    """Weighted mean of the negative log-likelihoods."""
    logits_TV = torch.nn.functional.linear(hidden_TD, head).float()
    losses_T = torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="none")
    return (losses_T * weights_T).sum() / weights_T.sum()


def block_mask(positions_1T: torch.Tensor) -> torch.Tensor:
    """(1, 1, T, T) bool: each token sees those before it in its own document."""
    document_T = (positions_1T[0] == 0).cumsum(0)
    before_TT = torch.ones(2 * document_T.shape, dtype=torch.bool).tril()
    return ((document_T[:, None] == document_T) & before_TT)[None, None]


def learning_rate(step: int, steps: int) -> float:
    """Of steps from 1: linear warm-up; constant until half of them, then a cosine down to 0."""
    falling = max(0.0, 2 * step / steps - 1)
    return LR * min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * falling))


def train(training: Training, bins: Bins, args: argparse.Namespace) -> dict[str, Any]:
    """All steps that are left; figures.

    Raises:
        SystemExit: the checkpoint is of other steps, or a loss is not finite.
    """
    started_s, checkpoint = time.monotonic(), args.out / CHECKPOINT
    figures: dict[str, Any] = {"step": 0, "steps": args.steps, "seconds": 0.0, "losses": []}
    if checkpoint.exists():
        figures = training.load(checkpoint)
        if figures["steps"] != args.steps:
            raise SystemExit(f"{checkpoint} is of --steps {figures['steps']}, not {args.steps}")
        print(f"continues at step {figures['step']} of {args.steps}", flush=True)
    first, before_s, marks = figures["step"], figures["seconds"], [started_s]
    rows = DataLoader(
        bins, batch_size=None, sampler=range(first, args.steps),
        num_workers=args.workers, prefetch_factor=4 if args.workers else None,
        pin_memory=args.device != "cpu",
    )  # fmt: skip
    for step, row in enumerate(rows, first + 1):
        loss = training.step(row, learning_rate(step, args.steps))
        if step % SHOW_EVERY and step < args.steps:
            continue
        value = round(loss.item(), 4)
        if not math.isfinite(value):
            raise SystemExit(f"the loss of step {step} is {value}")
        marks.append(time.monotonic())
        each_s = (marks[-1] - marks[-2]) / ((step - first) % SHOW_EVERY or SHOW_EVERY)
        seconds = round(before_s + marks[-1] - started_s, 1)
        figures |= {"step": step, "seconds": seconds, "tokens_per_s": round(args.bin / each_s)}
        figures["losses"].append([step, value])
        rate = f"{figures['tokens_per_s']:,} tokens/s"
        print(f"step {step}  loss {value:.4f}  {rate}  {seconds} s", flush=True)
        if step % CHECKPOINT_EVERY == 0:
            training.save(checkpoint, figures)
    return figures


def write(training: Training, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The folder that model servers and our roles load."""
    model = training.model.to(torch.bfloat16)
    model.config._attn_implementation = "sdpa"
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def numbers(text: str) -> list[float]:
    """One for each level."""
    found = [float(word) for word in text.split(",")]
    if len(found) != len(LEVELS) or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {len(LEVELS)} numbers of 0 or more")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--shape", choices=SHAPES, default="0.15b")
    parser.add_argument("--steps", type=int, default=2150)
    parser.add_argument("--levels", type=numbers, default=numbers("32,32,31,4.5,0.5"))
    parser.add_argument("--worked", type=numbers, default=numbers("0.7,0.7,0.5,0.35,0.35"))
    parser.add_argument("--bin", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--workers", type=int, default=min(12, max(1, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.bin < LONGEST or args.steps < 1:
        parser.error(f"--bin is at least {LONGEST}, --steps 1: got {args.bin}, {args.steps}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write the folder."""
    args = parse(argv)
    # Sums of integers have no such kernel and need none: strict are the backwards alone.
    torch.use_deterministic_algorithms(True, warn_only=True)
    one_order.ask(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    args.out.mkdir(parents=True, exist_ok=True)
    mixture = Mixture(args.levels, args.worked)
    tokenizer = make_tokenizer(mixture, args.seed)
    model = make_model(args.shape, tokenizer, args.seed)
    num_weights = sum(p.numel() for p in model.parameters())
    print(f"{num_weights:,} weights, {len(tokenizer)} pieces, on {args.device}", flush=True)
    is_compiled = args.device != "cpu" if args.compile is None else args.compile
    training = Training(model, args.device, is_compiled=is_compiled)
    bins = Bins(tokenizer.backend_tokenizer, mixture, args.seed, args.bin)
    figures = train(training, bins, args) | {"weights": num_weights, "pieces": len(tokenizer)}
    (args.out / "pretrain.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    write(training, tokenizer, args.out)
    (args.out / CHECKPOINT).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
