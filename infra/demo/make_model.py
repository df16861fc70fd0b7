"""Make the demo: an arithmetic data set, a tokenizer, and a tiny mixture-of-experts model.

The model is warm-started on demonstrations so that it *can* add, by writing running totals
(`7+8+3=` -> `15,18`), but mostly guesses (`~17`). Reinforcement learning has something to choose.
All is drawn from fixed seeds: the same hardware and library versions give the same bytes.

    python -m infra.demo.make_model           # writes infra/examples/demo, about a minute
    python -m infra.demo.make_model --check   # makes it elsewhere and compares with the hash
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from rlstreams.workers.model.model import causal_mask, configure_torch, right_padded

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
HASH_FILE = DEMO / "model.sha256"

SEED = 0
TRAIN_ROWS, TRAIN_SEED = 2048, 98
HELD_OUT_ROWS, HELD_OUT_SEED = 256, 99

STEPS = 1420
SECOND_STAGE_AT = 1300  # from here on guesses are the habit
WORKED_SHARE = (0.9, 0.4)  # of the demonstrations, in the first and in the second stage
LUCKY_SHARE = 0.1  # of the guesses are right
BATCH = 64
PEAK_LR, WARMUP_STEPS, FLOOR = 6e-3, 20, 0.1

SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = [*SPECIALS, *map(str, range(100)), *"+-*=,~:; "]
VOCABULARY = [*WORDS, *(f"<extra_{i}>" for i in range(128 - len(WORDS)))]
PAD, BOS, EOS = 0, 1, 2

Problem = tuple[int, ...]


def prompt_of(problem: Problem) -> str:
    """(7, 8, 3) -> "7+8+3="."""
    return "+".join(map(str, problem)) + "="


def worked(problem: Problem) -> str:
    """(7, 8, 3) -> "15,18": the running totals from the second term on."""
    totals = [sum(problem[:n]) for n in range(2, len(problem) + 1)]
    return ",".join(map(str, totals))


def guess(problem: Problem, rng: random.Random) -> str:
    """(7, 8, 3) -> "~11": the sum without one of the terms, now and then the sum itself."""
    missing = 0 if rng.random() < LUCKY_SHARE else rng.choice(problem)
    return f"~{sum(problem) - missing}"


def draw(rng: random.Random) -> Problem:
    """3 to 6 terms from 1 to 9."""
    return tuple(rng.randint(1, 9) for _ in range(rng.randint(3, 6)))


def distinct(rows: int, seed: int, excluded: set[Problem]) -> list[Problem]:
    """`rows` different problems that are not in `excluded`."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < rows:
        problem = draw(rng)
        if problem not in excluded:
            found[problem] = None
    return list(found)


def write_rows(path: Path, problems: list[Problem]) -> None:
    """JSON lines with `prompt` and `answer`."""
    rows = ({"prompt": prompt_of(p), "answer": str(sum(p))} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per number up to 99 and per sign; adds no special tokens by itself."""
    words = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[1-9][0-9]|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def make_model() -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 264 thousand parameters with random weights."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.1,  # at the default of 0.02 it learns to add more slowly
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    return Qwen3MoeForCausalLM(config)


def demonstrations(
    encode: Callable[[str], list[int]], excluded: set[Problem]
) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Batches for each step: sequences, and for each the number of tokens before the answer."""
    rng = random.Random(SEED)
    for step in range(STEPS):
        share = WORKED_SHARE[step >= SECOND_STAGE_AT]
        sequences, prompt_lengths = [], []
        while len(sequences) < BATCH:
            problem = draw(rng)
            if problem in excluded:
                continue
            answer = worked(problem) if rng.random() < share else guess(problem, rng)
            prompt = [BOS, *encode(prompt_of(problem))]
            sequences.append([*prompt, *encode(answer), EOS])
            prompt_lengths.append(len(prompt))
        yield sequences, prompt_lengths


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return PEAK_LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def answer_loss(
    model: Qwen3MoeForCausalLM, sequences: list[list[int]], prompt_lengths: list[int]
) -> torch.Tensor:
    """Mean negative log-likelihood of the answers' tokens, nats."""
    ids_BT, real_BT = right_padded(sequences, PAD)
    positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    logits_BTV = model(
        input_ids=ids_BT,
        attention_mask=causal_mask(real_BT),
        position_ids=positions_BT,
        use_cache=False,
    ).logits
    is_answer_BT = real_BT & (positions_BT >= torch.tensor(prompt_lengths)[:, None])
    targets_BT = torch.where(is_answer_BT, ids_BT, -100)
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=-100
    )


def warm_start(
    model: Qwen3MoeForCausalLM, encode: Callable[[str], list[int]], excluded: set[Problem]
) -> None:
    """Teach the model to add, then to guess."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0
    )
    model.train()
    for step, (sequences, prompt_lengths) in enumerate(demonstrations(encode, excluded)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = answer_loss(model, sequences, prompt_lengths)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def make(folder: Path) -> str:
    """Write model and data into `folder`; the SHA-256 of the weights file."""
    held_out = distinct(HELD_OUT_ROWS, HELD_OUT_SEED, set())
    train = distinct(TRAIN_ROWS, TRAIN_SEED, set(held_out))
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "held_out.jsonl", held_out)
    write_rows(folder / "train.jsonl", train)
    tokenizer, model = make_tokenizer(), make_model()
    warm_start(model, lambda text: tokenizer.encode(text, add_special_tokens=False), set(held_out))
    target = folder / "model"
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()


def check() -> int:
    """Make the model anew in a temporary folder; 0 if its bytes are the committed ones."""
    expected = HASH_FILE.read_text(encoding="utf-8").split()[0]
    with tempfile.TemporaryDirectory() as folder:
        actual = make(Path(folder))
    print(f"committed {expected}\nmade      {actual}")
    if actual != expected:
        capability = torch.backends.cpu.get_cpu_capability()
        print(f"they differ: bytes depend on torch ({torch.__version__}) and CPU ({capability})")
    return int(actual != expected)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo's model and data.")
    parser.add_argument("--check", action="store_true", help="compare with the committed hash")
    arguments = parser.parse_args()
    configure_torch(threads=1)
    if arguments.check:
        return check()
    digest = make(DEMO)
    HASH_FILE.write_text(f"{digest}  model/model.safetensors\n", encoding="utf-8")
    print(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
