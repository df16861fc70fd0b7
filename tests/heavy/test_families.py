"""Families of models: each samples, is scored and learns as its own library says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlstreams.workers.compute.score import scorer_of
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.engines import selfcheck
from rlstreams.workers.engines.base import SampleRequest, TokenSequence
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.selfcheck import (
    check_decoding,
    check_scoring,
    padding_difference,
)
from rlstreams.workers.model.attention import Attention, attention_of
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.families import library_model
from rlstreams.workers.model.folder import read_config
from rlstreams.workers.model.model import load_model, model_class, weights_of
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.contract.engine_rigs import announced, collect, driven, request
from tests.unit.trainer.trainer_builders import batch_of, random_samples

TOLERANCE = 1e-4  # nats
PROMPTS = ([1, 5, 9, 20, 30, 7, 8], [4], [3, 3, 40, 41, 11])
NEW_TOKENS = 14  # more than any family's window
# Dense, with windows, with experts whose routes are recorded or not, with a state; all at night.
LEARN_BY_DAY = (
    "Qwen3ForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def library(folder: Path) -> torch.nn.Module:
    """The model as its library loads and masks it, with its reference kernels."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def true_logprobs(model: Any, token_ids: list[int]) -> np.ndarray:
    """Of every token but the first."""
    ids = torch.tensor([token_ids])
    logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    return logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()


async def sampled(engine: BuiltinEngine, published: Any) -> list[tuple[list[int], np.ndarray, Any]]:
    """Whole sequences, log-probs of their answers, expert rows; requests share the batch."""
    found: list[tuple[list[int], np.ndarray, Any]] = []
    async with driven(engine):
        await engine.pull(published, FileWeightChannel())
        requests: list[SampleRequest] = [
            request(f"{n}/0/0", token_ids=np.array(prompt, np.int32), max_new_tokens=NEW_TOKENS)
            for n, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*(collect(engine, wanted) for wanted in requests))
        for prompt, (segment,) in zip(PROMPTS, answers, strict=True):
            whole = [*prompt, *segment.token_ids.tolist()]
            found.append((whole, segment.logprobs, segment.routed_experts))
    return found


def said_before_loading(folder: Path) -> bool:
    """Whether `doctor`, which reads sources, knows what the loaded class says of itself."""
    found, cls = library_model(read_config(folder)), model_class(folder)
    said = (found.has_class, found.has_sdpa, found.has_expert_kernels)
    return said == (True, bool(cls._supports_sdpa), cls._can_set_experts_implementation())


def trained_hash(folder: Path) -> tuple[str, str]:
    """Before and after two steps."""
    training = Training(folder, TrainerSection(), threads=1)
    for seed in range(2):
        training.learner.step(batch_of(random_samples(8, seed)))
    return training.model_hash, weight_hash(training.learner.weights())


@pytest.mark.parametrize("name", families.SAMPLED)
async def test_a_family_samples_and_is_scored_as_its_library_says(
    name: str, tmp_path: Path
) -> None:
    """Log-probs of answers sampled in a shared batch, and scored in one: both the library's own."""
    folder = families.make(name, tmp_path / "model")
    engine, scorer, truth = BuiltinEngine(folder, slots=4), scorer_of(folder), library(folder)
    server = FileWeightServer(tmp_path / "weights", keep=2)
    published = announced(server, server.publish(0, weights_of(load_model(folder))))
    answers = await sampled(engine, published)
    scorer.pull(published, FileWeightChannel())
    sequences = [TokenSequence(token_ids=np.array(whole, np.int32)) for whole, _, _ in answers]
    scores = scorer.score(sequences, 0, 1.0)
    for (whole, logprobs, _), scored in zip(answers, scores, strict=True):
        expected = true_logprobs(truth, whole)
        np.testing.assert_allclose(logprobs, expected[-len(logprobs) :], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(scored.logprobs[1:], expected, rtol=0, atol=TOLERANCE)
    # Neither certain nor uniform: a test on such a model would see nothing.
    mean = np.concatenate([logprobs for _, logprobs, _ in answers]).mean()
    assert -0.95 * np.log(families.VOCABULARY) < mean < -0.1
    assert said_before_loading(folder)
    recorded = [experts is not None for _, _, experts in answers]
    assert [name in families.MOE] * len(PROMPTS) == recorded


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LEARN_BY_DAY else pytest.mark.slow)
        for name in (*families.SAMPLED, *families.STATEFUL)
    ],
)
def test_a_family_learns_the_same_twice(name: str, tmp_path: Path) -> None:
    """Two optimizer steps change the weights, and give the same bits when done again."""
    folder = families.make(name, tmp_path)
    before, after = trained_hash(folder)
    assert before != after
    assert (before, after) == trained_hash(folder)


@pytest.mark.parametrize("name", families.STATEFUL)
def test_a_family_with_states_is_scored_but_not_sampled(name: str, tmp_path: Path) -> None:
    """Padded batches give the library's numbers; the engine refuses, and says what is possible."""
    folder = families.make(name, tmp_path)
    check_scoring(load_model(folder), families.VOCABULARY)
    with pytest.raises(EngineError, match=r"scored and trained, but not sampled here"):
        BuiltinEngine(folder, slots=2)


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_family_that_would_give_other_numbers_is_refused(name: str, tmp_path: Path) -> None:
    folder = families.make(name, tmp_path)
    kind = name.removesuffix("ForCausalLM").lower()[:6]
    with pytest.raises(EngineError, match=rf"a {kind}"):
        BuiltinEngine(folder, slots=2)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma3ForCausalLM"])
def test_the_check_sees_a_forgotten_window(name: str, tmp_path: Path) -> None:
    """Masks of layers that see three tokens give the library's numbers; masks of all do not."""
    model = load_model(families.make(name, tmp_path, sliding_window=3))
    assert padding_difference(model, families.VOCABULARY, attention_of(model).causal) < TOLERANCE
    assert padding_difference(model, families.VOCABULARY, Attention().causal) > selfcheck.TOLERANCE


def test_in_16_bits_the_size_of_the_logits_says_how_far_off_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Gemma 3 270M lie around 40, where bfloat16 has steps of a quarter: its cache was
    found 0.22 nats off. A forgotten window is off by more, and so is that much of small ones."""
    model = load_model(families.make("Gemma3ForCausalLM", tmp_path, sliding_window=3), "bfloat16")
    monkeypatch.setattr(selfcheck, "decoding_difference", lambda *_of: 0.22)
    with pytest.raises(EngineError, match=r"up to 0\.22 nats off"):
        check_decoding(model, families.VOCABULARY)
    with torch.no_grad():
        head = model.get_output_embeddings()
        largest = model(input_ids=torch.ones(1, 1, dtype=torch.int64)).logits.abs().max()
        head.weight = torch.nn.Parameter(head.weight * (40 / largest))
    check_decoding(model, families.VOCABULARY)
    monkeypatch.setattr(selfcheck, "attention_of", lambda _model: Attention())
    with pytest.raises(EngineError, match=r"padded its log-probs are up to"):
        check_scoring(model, families.VOCABULARY)


def test_a_model_that_also_sees_pictures_runs_as_a_language_model(tmp_path: Path) -> None:
    """Its numbers lie one level down in `config.json`; padded and decoded they are its own."""
    from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration

    families.make("Gemma3ForCausalLM", tmp_path / "text")
    text = {k: v for k, v in read_config(tmp_path / "text").items() if k != "architectures"}
    picture = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
               "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=picture, mm_tokens_per_image=1)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    engine = BuiltinEngine(tmp_path / "model", slots=2)
    assert (families.VOCABULARY, 64) == (engine.vocab_size, engine.max_tokens)
    asyncio.run(engine.close())
    before, after = trained_hash(tmp_path / "model")
    assert before != after
