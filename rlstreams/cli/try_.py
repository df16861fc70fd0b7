"""`rlstreams try CONFIG...`: three rows through prompt, model and reward; no broker, seconds."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlstreams.cli.named import ProgressLine
from rlstreams.cli.options import CONFIG, N, command, option
from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.dataset.limits import PromptEncoder
    from rlstreams.workers.dataset.row import Row
    from rlstreams.workers.sandbox.reward import Verifier


MOST_ANSWERS = 4096  # all are sampled side by side, and printed


@command(
    "try",
    "rlstreams try",
    "rlstreams try run.toml --rows 10 --samples 1",
    takes=CONFIG,
)
@option("--rows", type=N, help="rows of data.train, from the first", default=3, show_default=True)
@option("--samples", type=N, help="answers per row", default=4, show_default=True)
def run(args: Namespace) -> int:
    """run a few rows through prompt, model and reward, without a broker

    Shows each prompt as the model sees it, the model's answers, their rewards by part, how
    long each takes, and what a run would reject and why. Of agents it shows each session: what
    was said call by call, tools, how it ended, and the last output of one that failed. Samples
    with the built-in engine, on the GPU that the run has for it or for its trainer. Exit status 0
    if every answer was scored. At most 4,096 answers in all.
    """
    from rlstreams.check.doctor.own_code import own_code_check
    from rlstreams.workers.config.across import judging
    from rlstreams.workers.config.load import load
    from rlstreams.workers.rollout.verifiers import make_verifier

    if args.rows * args.samples > MOST_ANSWERS:
        raise ConfigError(
            f"--rows {args.rows} with --samples {args.samples} are {args.rows * args.samples:,} "
            f"answers, and `try` samples at most {MOST_ANSWERS:,}: lower one of them, or have "
            "`rlstreams up` sample them"
        )
    config = load(*args.config)
    section = judging(config)
    with make_verifier(section) as verifier:  # first: what is wrong with it shows at once
        if check := own_code_check(config):
            print(f"{check.name}: {check.found}")
        return _rows(config, verifier, args)


def _rows(config: RunConfig, verifier: Verifier, args: Namespace) -> int:
    from rlstreams.check.doctor.model import check_decoding, model_checks, read_model
    from rlstreams.workers.dataset.open import first_rows, prompt_encoder

    model = read_model(config.model.path)
    check_decoding(model, "`rlstreams try` samples with the built-in engine")
    for check in model_checks(model, config.model.dtype):
        print(f"{check.name}: {check.found}")
    encoder = prompt_encoder(config)
    rows = first_rows(config.data, args.rows)
    from rlstreams.workers.model.base import EngineError

    make = _agents if config.agent else _answers
    try:
        import_s = _imported(config.model.path)
        print(f"loading the model, and sampling {args.samples} answers a row ...", flush=True)
        return make(config, verifier, encoder, rows, args.samples, import_s)
    except EngineError as err:
        raise ConfigError(f"model.path: {err}") from err


def _imported(model_path: str) -> float:
    """Import what the model needs, most of a short trial's time; return the seconds that it took.

    Raises:
        EngineError: this transformers has no such model.
    """
    from rlstreams.workers.config.hub import model_folder

    folder = model_folder(model_path)
    print("importing torch and transformers ...", flush=True)
    started_s = time.monotonic()
    from rlstreams.workers.model.model import import_library, model_class

    import_library()
    model_class(folder)
    return time.monotonic() - started_s


def _answers(
    config: RunConfig,
    verifier: Verifier,
    encoder: PromptEncoder,
    rows: Sequence[Row],
    num_samples: int,
    import_s: float,
) -> int:
    from rlstreams.check.trial.sample import Trial, row_lines, spent, summary

    trial = Trial(config, verifier, encoder, print, ProgressLine())
    trial.times.import_s = import_s
    try:
        tried = trial.run(rows, num_samples)
    finally:
        trial.close()
    print()
    for index, row in enumerate(tried, 1):
        print("\n".join(row_lines(row, index, len(tried), trial.decode)))
    print("\n".join([*summary(tried), *spent(trial.times)]))
    return int(any(c.judgement is None for row in tried for c in row.completions))


def _agents(
    config: RunConfig,
    verifier: Verifier,
    encoder: PromptEncoder,
    rows: Sequence[Row],
    num_samples: int,
    import_s: float,
) -> int:
    from rlstreams.check.trial.agents import AgentTrial, agent_lines
    from rlstreams.check.trial.sample import Times, spent, summary
    from rlstreams.words.spelling import spelling

    spelled = spelling("", config.model.path)
    trial = AgentTrial(
        config=config, verifier=verifier, encoder=encoder, spelling=spelled, note=print,
        say=ProgressLine(), times=Times(import_s=import_s),
    )  # fmt: skip
    tried = trial.run(rows, num_samples)
    print()
    for agent in tried:
        print("\n".join(agent_lines(agent)))
    for agent in tried:
        print(f"agent {agent.name}")
        print("\n".join(f"  {line}" for line in summary(agent.rows)))
    print("\n".join(spent(trial.times)))
    every = [c for agent in tried for row in agent.rows for c in row.completions]
    return int(any(c.judgement is None for c in every))
