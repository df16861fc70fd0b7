"""`rlstreams export-model RUN --to DIR`: the trained model as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlstreams.cli.arguments import Commands, add_run, command, configuration, opened_run


def add(subparsers: Commands) -> None:
    """Add the command."""
    parser = command(
        subparsers,
        "export-model",
        run,
        """
        the trained model as a Hugging Face folder

        Takes a checkpoint that the log confirms and writes what other programs load:
        configuration, tokenizer, and weights under the names of the folder that training began
        with; adapters of trainer.lora are merged into them. What was written is loaded again and
        its hash compared with the log's before the folder gets its name.

        --to DIR  a folder that is not there yet, or is empty
        --step N  a step with a checkpoint (the newest)
        --model DIR  where the model folder is now

        rlstreams export-model runs/demo --to models/demo
        rlstreams export-model runs/demo --to models/demo-40 --step 40
        rlstreams export-model runs/demo --to models/demo --dtype bfloat16
        """,
        to={"required": True},
        step_={"type": int, "default": 0},
    )
    add_run(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="",
        help="of the weights (as the checkpoint has them)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.workers.config.hub import model_folder

    if args.step < 0:
        raise ConfigError(f"--step must be a step that was done, got {args.step}")
    config = configuration(args.config, args.overrides)
    from rlstreams.show.export.model import export_model

    with opened_run(config) as log:
        done = export_model(
            log.bus,
            Path(config.folder),
            model_folder(args.model or config.model.path),
            Path(args.to),
            step=args.step,
            dtype=args.dtype,
        )
    same = (
        "the log's" if done.weight_hash == done.ledger_hash else f"after the cast to {done.dtype}"
    )
    print(
        f"{args.to}: version {done.policy_version} of run {done.run}, step {done.step}, "
        f"{done.num_bytes / 1e6:,.1f} MB of {done.dtype}\n"
        f"loaded again: hash {done.weight_hash[:12]}, {same}"
    )
    return 0
