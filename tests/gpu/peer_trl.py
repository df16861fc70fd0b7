"""TRL's trainers on the workload of `end_to_end`, or of `reasoner`; run by it.

    python -m tests.gpu.peer_trl --folder FOLDER --url http://127.0.0.1:8200 --out trl.json
    python -m tests.gpu.peer_trl --folder FOLDER --colocate --out trl.json  # one GPU for both

With a server, AsyncGRPOTrainer; `--colocate`: GRPOTrainer with vLLM in its own process, for NCCL
does not join two processes on one GPU. Two parts of AsyncGRPOTrainer (TRL 1.16.0) are replaced:
FlashAttention 3 comes from the hub (torch's `varlen_attn` computes the same), and answers are
parsed by a chat template that TRL knows (here: decoded).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import trl.experimental.async_grpo.async_rollout_worker as rollout_module
from transformers import TrainerCallback


def decoded(tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, str]:
    """An answer as a message."""
    return {"role": "assistant", "content": tokenizer.decode(ids)}


# At import: TRL's own sampling process imports this file too.
rollout_module.parse_response = decoded
rollout_module.add_response_schema = lambda processing_class: processing_class


def reward(completions: list[Any], **_: object) -> list[float]:
    """Half of the random answers are right, so groups differ."""
    return [float(len(str(completion)) % 2) for completion in completions]


class Right:
    """The reward of an example's tasks: an answer without its end earns nothing.

    Args:
        module: of the tasks.
        end: token that ends an answer, as text.
        tokenizer: of GRPOTrainer, whose texts are without the end: its ids are decoded.
    """

    __name__ = "right"  # TRL's name of the reward

    def __init__(self, module: str, end: str, tokenizer: Any = None) -> None:
        self._module, self._end, self._tokenizer = module, end, tokenizer

    def __call__(
        self,
        completions: list[Any],
        prompts: list[Any],
        answer: list[str],
        task: list[str],
        completion_ids: list[list[int]] = (),  # type: ignore[assignment]
        **_: object,
    ) -> list[float]:
        """One number for each answer."""
        tasks = importlib.import_module(self._module)
        if self._tokenizer is not None:
            completions = [[decoded(self._tokenizer, ids)] for ids in completion_ids]
        texts = [completion[-1]["content"].partition(self._end) for completion in completions]
        return [
            tasks.reward(prompt[-1]["content"], text, wanted, {"task": name}) * bool(end)
            for prompt, (text, end, _), wanted, name in zip(
                prompts, texts, answer, task, strict=True
            )
        ]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    softmax_scale: float | None = None,
    **_: object,
) -> Any:
    """Causal attention over documents side by side, as `flash_attn_varlen_func`."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": softmax_scale} if "scale" in known else {}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        copies = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    return varlen_attn(
        q, k, v, starts_q.int(), starts_k.int(), int(longest_q), int(longest_k), **options
    )


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended; now and then the model is kept, of which the clock says nothing."""

    def __init__(self, folder: Path, keep_every: int) -> None:
        self.ends_s: list[float] = []
        self._folder, self._keep_every, self._kept_s = folder, keep_every, 0.0

    def on_step_end(self, *_: Any, model: Any, processing_class: Any, **__: Any) -> None:
        """Note, show, keep."""
        now_s = time.time()
        self.ends_s.append(now_s - self._kept_s)
        number = len(self.ends_s)
        sys.stdout.write(f"step {number} at {self.ends_s[-1]:.1f}\n")
        sys.stdout.flush()
        if self._keep_every and number % self._keep_every == 0:
            state = {name: t.detach().bfloat16() for name, t in model.state_dict().items()}
            model.save_pretrained(self._folder / f"kept-{number}", state_dict=state)
            processing_class.save_pretrained(self._folder / f"kept-{number}")
            self._kept_s += time.time() - now_s


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of its server, for AsyncGRPOTrainer")
    where.add_argument("--colocate", action="store_true", help="GRPOTrainer, vLLM on the same GPU")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=17000, help="tokens of a row; 0: --micro")
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-checkpointing", action="store_true", help="of activations")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--micro", type=int, default=64, help="samples at once")
    parser.add_argument("--seed", type=int, default=42, help="TRL's own is 42")
    parser.add_argument("--tasks", default="", help="module of a reward that is not random")
    parser.add_argument("--keep-every", type=int, default=0, help="steps between kept models")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def shared_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": str(args.out.parent / "trl"),
        "num_generations": args.group,
        "max_completion_length": args.tokens,
        "max_steps": args.steps,
        "bf16": True,
        # A small model needs none.
        "gradient_checkpointing": not (args.tasks or args.no_checkpointing),
        "lr_scheduler_type": "constant_with_warmup" if args.tasks else "linear",
        "warmup_steps": 10 if args.tasks else 0,
        "report_to": [],
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        "learning_rate": args.lr,
        "seed": args.seed,
    }


def behind_a_server(args: argparse.Namespace, **what: Any) -> Any:
    """AsyncGRPOTrainer: the server samples on another GPU while it trains."""
    import trl.experimental.async_grpo.packing as packing_module
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    packing_module._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    rows = 16 if args.budget > 0 else args.micro
    config = AsyncGRPOConfig(
        **shared_settings(args),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=args.samples // rows,
        dtype=args.dtype,
        token_budget=args.budget,
        max_staleness=2,
        max_inflight_tasks=args.in_flight,
        vllm_server_base_url=args.url,
    )
    return AsyncGRPOTrainer(args=config, **what)


def on_one_gpu(args: argparse.Namespace, **what: Any) -> Any:
    """GRPOTrainer: samples, then trains. A small model leaves room for vLLM beside it: no sleep."""
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **shared_settings(args),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.samples // args.micro,
        model_init_kwargs={"dtype": args.dtype},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=2048,
    )
    return GRPOTrainer(args=config, **what)


def main() -> None:
    """Train, and write when each step ended."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    args = parse()
    clock = Clock(args.out.parent, args.keep_every)
    rows = load_dataset("json", data_files=str(args.folder / "train.jsonl"), split="train")
    as_chat = {"role": "user"}
    rows = rows.map(
        lambda row: {"prompt": [as_chat | {"content": row["prompt"]}]},
        remove_columns=[] if args.tasks else ["answer"],
    )
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    judge = reward
    if args.tasks:
        judge = Right(args.tasks, tokenizer.eos_token, tokenizer if args.colocate else None)
    trainer = (on_one_gpu if args.colocate else behind_a_server)(
        args,
        processing_class=tokenizer,
        model=str(args.folder / "model"),
        reward_funcs=judge,
        train_dataset=rows,
        callbacks=[clock],
    )
    trainer.train()
    found = {
        "ends_s": clock.ends_s,
        "history": trainer.state.log_history,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }
    args.out.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
