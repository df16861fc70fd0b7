"""Whether a reference can be compared with the policy: token ids have to mean the same in both.

Rows of the embeddings beyond the tokenizer's tokens are padding, which sizes of one family have in
different number; so tokens are compared, and numbers of rows only where a folder has no tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.model.folder import read_config, vocab_size_of
from rlstreams.workers.model.tokenizer import Tokenizer


def check_tokens(config: RunConfig, reference: Path, model: Path) -> None:
    """Check the folder that `logprob.reference` names against that of `model.path`.

    Raises:
        ConfigError: an id is another token, or has no row there; or `trainer.loss.distill_top_k`
            asks for more tokens than there are, or of rows that the policy lacks.
        EngineError, TokenizerError: a file cannot be read.
    """
    name = f"logprob.reference is {config.logprob.reference!r}"
    rows, own_rows = (vocab_size_of(read_config(folder)) for folder in (reference, model))
    untold = [f for f in (reference, model) if not (f / "tokenizer.json").is_file()]
    if not untold and reference != model:
        theirs, ours = (Tokenizer.load(folder).tokens for folder in (reference, model))
        for token_id, token in sorted(ours.items()):
            if (other := theirs.get(token_id, token)) != token:
                raise ConfigError(
                    f"{name}, in which token {token_id} is {other!r}; in model.path it is "
                    f"{token!r}: name a model of the same tokenizer"
                )
        if (last := max(ours)) >= rows:
            raise ConfigError(
                f"{name}, whose vocabulary has {rows} tokens; model.path's tokenizer has token "
                f"{last}, {ours[last]!r}: name a model of the same tokenizer"
            )
    elif rows != own_rows:
        raise ConfigError(
            f"{name}, whose vocabulary has {rows} tokens; {config.model.path} has {own_rows}, and "
            f"{untold[0]} has no tokenizer.json, which would say whether only padding differs: "
            "name a model of the same tokenizer"
        )
    if (top_k := config.trainer.loss.distill_top_k) and rows > own_rows:
        raise ConfigError(
            f"trainer.loss.distill_top_k is {top_k}, but logprob.reference has {rows} rows of "
            f"tokens and model.path {own_rows}: a row that the policy lacks may be among the "
            "likeliest; set it to 0, which compares the sampled token alone"
        )
    if top_k > rows:
        raise ConfigError(
            f"trainer.loss.distill_top_k is {top_k}, but the vocabulary has {rows} tokens"
        )
