"""`rlstreams try CONFIG...`: three rows through prompt, model and reward; no broker, seconds."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from rlstreams.cli.options import CONFIG, N, command, option
from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.rollout.turns import Turns
    from rlstreams.workers.sandbox.reward import Verifier


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
    long each takes, and what a run would reject and why. Samples with the built-in engine.
    Exit status 0 if every answer was scored.
    """
    from rlstreams.workers.config.load import load
    from rlstreams.workers.rollout.verifiers import make_verifier

    config = load(*args.config)
    with make_verifier(config.reward) as verifier:  # first: what is wrong with it shows at once
        return _rows(config, verifier, args)


def _rows(config: RunConfig, verifier: Verifier, args: Namespace) -> int:
    from rlstreams.check.doctor.model import model_checks, read_model
    from rlstreams.workers.dataset.open import first_rows, prompt_encoder

    model = read_model(config.model.path)
    for check in model_checks(model, config.model.dtype):
        print(f"{check.name}: {check.found}")
    encoder = prompt_encoder(config)
    rows = first_rows(config.data, "data.train", args.rows)
    print("loading the model ...", flush=True)
    from rlstreams.check.trial.sample import Trial, row_lines, summary
    from rlstreams.workers.model.base import EngineError
    from rlstreams.workers.rollout.turns import make_turns

    def turns(vocab_size: int) -> Turns | None:
        return make_turns(config, vocab_size=vocab_size, note=print)

    try:
        trial = Trial(config, verifier, encoder, turns)
    except EngineError as err:
        raise ConfigError(f"model.path: {err}") from err
    try:
        tried = trial.run(rows, args.samples)
    finally:
        trial.close()
    print()
    for index, row in enumerate(tried, 1):
        print("\n".join(row_lines(row, index, len(tried), trial.decode)))
    print("\n".join(summary(tried, trial.times)))
    return int(any(c.judgement is None for row in tried for c in row.completions))
