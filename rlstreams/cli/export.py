"""`rlstreams export samples|model`: a run's samples and model in files for other tools."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstreams.cli.named import configuration, opened, opened_run
from rlstreams.cli.options import LOG, RUN, CommandGroup, N, X, command, one_of, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted
from rlstreams.words.spelling import Spelling, spelling

if TYPE_CHECKING:
    import pyarrow as pa

    from rlstreams.streams.run.run_log import RunLog


EXPORT = CommandGroup("export", "samples as a table, or the trained model", was="samples")


@command(
    "samples",
    "rlstreams export samples runs/demo --out samples.parquet --min-reward 1",
    "rlstreams export samples runs/demo --out - --step 12",
    "rlstreams export samples --schema",
    of=EXPORT,
    takes=LOG,
    needs_names=False,  # `--schema` needs none
)
@option("--out", metavar="FILE", help="FILE.parquet, FILE.jsonl, or -", default="")
@option("--schema", is_flag=True, help="print the table's columns and end")
@option("--min-reward", type=X, help="only samples of X or more")
@option("--step", type=N, help="only samples that step N trained on")
@option("--tokenizer", metavar="DIR", help="where tokenizer.json is, if it has moved", default="")
def samples(args: Namespace) -> int:
    """samples as Parquet or JSON lines

    Reads the log and writes a row for each finished rollout with prompt, completion, reward,
    tokens, log-probs and outcome. Events as they are: `broker tail TOPIC --json`.
    """
    from rlstreams.show.export.sample_table import SCHEMA

    if args.schema:
        print(described(SCHEMA))
        return 0
    if not args.out:
        raise ConfigError("export samples needs --out FILE.parquet, --out FILE.jsonl, or --out -")
    from rlstreams.show.export.sample_table import check_name, write

    check_name(args.out)
    with opened(*args.config) as source:
        log, spelled = source.log, spelling(args.tokenizer, source.model_path)
        num_rows = write(_rows(log, spelled, args), SCHEMA, args.out)
        num_unreadable, problems = log.num_unreadable, log.problems
    for problem in problems:
        print(f"{log.name}: {problem}", file=sys.stderr)
    left = f"; {counted(num_unreadable, 'record')} could not be read" if num_unreadable else ""
    print(f"{counted(num_rows, 'row')} in {args.out}{left}", file=sys.stderr)
    return 0


def described(schema: pa.Schema) -> str:
    """The columns as text, one a line: name, type, meaning."""
    names = [field.name for field in schema]
    types = [str(field.type) for field in schema]
    docs = [(field.metadata or {}).get(b"doc", b"").decode() for field in schema]
    wide = max(map(len, names))
    lines = [schema.metadata[b"doc"].decode(), ""]
    for name, kind, doc in zip(names, types, docs, strict=True):
        lines.append(f"{name.ljust(wide)}  {kind}" + (f"  {doc}" if doc else ""))
    return "\n".join(lines)


def _rows(log: RunLog, spelled: Spelling, args: Namespace) -> Iterator[Mapping[str, Any]]:
    from rlstreams.show.export.sample_table import sample_rows

    return (
        row
        for row in sample_rows(log, spelled)
        if (args.min_reward is None or row["reward"] >= args.min_reward)
        and (args.step is None or row.get("step") == args.step)
    )


@command(
    "model",
    "rlstreams export model runs/demo --out models/demo",
    "rlstreams export model runs/demo --out models/demo-40 --step 40",
    "rlstreams export model runs/demo --out models/demo --dtype bfloat16",
    of=EXPORT,
    takes=RUN,
)
@option("--out", metavar="DIR", help="a folder that is not there yet, or is empty", default="")
@option("--step", type=N, help="a step with a checkpoint (the newest)")
@option("--model", metavar="DIR", help="where the model folder is now", default="")
@option(
    "--dtype",
    type=one_of("float32", "bfloat16", "float16"),
    help="of the weights (as the checkpoint has them)",
)
def model(args: Namespace) -> int:
    """the trained model as a Hugging Face folder

    Takes a checkpoint that the log confirms and writes what other programs load:
    configuration, tokenizer, and weights under the names of the folder that training began
    with; adapters of trainer.lora are merged into them. What was written is loaded again and
    its hash compared with the log's before the folder gets its name.
    """
    from rlstreams.workers.config.hub import model_folder

    config = configuration(*args.config)
    from rlstreams.show.export.model import export_model

    with opened_run(config) as log:
        done = export_model(
            log.bus,
            Path(config.folder),
            model_folder(args.model or config.model.path),
            Path(args.out),
            step=args.step or 0,
            dtype=args.dtype or "",
        )
    same = (
        "the log's" if done.weight_hash == done.ledger_hash else f"after the cast to {done.dtype}"
    )
    print(
        f"{args.out}: version {done.policy_version} of run {done.run}, step {done.step}, "
        f"{done.num_bytes / 1e6:,.1f} MB of {done.dtype}\n"
        f"loaded again: hash {done.weight_hash[:12]}, {same}"
    )
    return 0
