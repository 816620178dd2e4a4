"""The engine over models of transformers: their texts, whatever else is under way."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from configs import run_config
from generation_models import SHAPES, VOCAB, save_theirs, their_greedy, their_model, tolerance

from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.request import Beams, GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.families import family_of
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of
from megatron.tokenizer.plain import NullTokenizer

GREEDY = Sampling(greedy=True)
LONG = {
    *("llama", "llama4_text", "mistral", "bamba", "deepseek_v3", "nemotron_h"),
    *("qwen3_next", "youtu"),
}
"""Shapes whose tests are long ones: execution/test_runner.py and test_layer_memory.py have them, or
their kinds of layers, in the default suite."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[pytest.mark.proof] if s in LONG else []) for s in SHAPES],
)
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def runner(shape, tmp_path_factory):
    source = HuggingFaceFolder(save_theirs(tmp_path_factory.mktemp("theirs") / shape, shape))
    config, model = source.model, model_of(source, torch.float32, torch.device("cpu"))
    special = SimpleNamespace(pad=0, bos=0)
    generation = family_of(config.family).generation(run_config(model=config), special)
    stages = StagedLayers.alone(model, config.hidden_size)
    return PagedRunner(stages, config, generation, pages=40, page_size=4)


def engine_of(runner, *limits):
    return GenerationEngine(runner, NullTokenizer(VOCAB - 1), EngineLimits(*limits))


def requests(draw, encodes):
    """Prompts have the same starts; three of four are random draws or of other kinds."""
    start = [draw.randrange(VOCAB) for _ in range(11)]
    for number in range(11):
        prompt = start[: draw.randrange(12)] + [
            draw.randrange(VOCAB) for _ in range(1 + 3 * number // 2)
        ]
        sampling = GREEDY if number % 4 == 0 else Sampling(seed=number, top_p=0.9)
        yield GenerationRequest(
            tuple(prompt),
            StopRules(draw.randrange(1, 12)),
            sampling,
            Beams(3) if number % 8 == 1 else None,
            logprobs=draw.choice([None, 0, 3]),
            prompt_logprobs=None if encodes else draw.choice([None, None, 2]),
        )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.proof) for n in range(1, 5))]
)
def test_nothing_depends_on_others(runner, seed):
    """To the last bit: alone, one after another and whole; or together, in pieces, prompts shared,
    in another order."""
    draw = random.Random(seed)
    asked = list(requests(draw, runner.max_prompt is not None))
    alone = [engine_of(runner, 4, 100, 4).complete([each])[0] for each in asked]
    order = draw.sample(range(len(asked)), len(asked))
    engine = engine_of(runner, 7, 19, 20)
    found = engine.complete([asked[number] for number in order])
    shares = runner.max_prompt is None and runner.slots is None
    assert engine.stats.prefix_hit_tokens > 0 or not shares
    for number, completion in zip(order, found, strict=True):
        assert dataclasses.replace(completion, cached=0) == alone[number]


@pytest.mark.proof
def test_drafts_change_no_bit(runner):
    """A vocabulary of few tokens, so that some drafts are right."""
    draw = random.Random(9)
    asked = [
        GenerationRequest(
            tuple(draw.choice([3, 5, 7]) for _ in range(length)),
            StopRules(14),
            Sampling(seed=length, bias={3: 40.0, 5: 40.0, 7: 40.0}),
            logprobs=2,
        )
        for length in (1, 4, 11, 20)
    ]
    if runner.slots is not None:
        pytest.skip("states do not return to those before a wrong draft")
    plain = engine_of(runner, 4, 100, 4).complete(asked)
    engine = engine_of(runner, 4, 30, 4, 3)
    for one, other in zip(engine.complete(asked), plain, strict=True):
        assert (one.tokens, one.scores) == (other.tokens, other.scores)
    assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens


def test_greedy_against_transformers(runner, shape):
    theirs, draw = their_model(shape), random.Random(5)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(n)] for n in (1, 9, 20)]
    asked = [GenerationRequest((*each,), StopRules(12), GREEDY, logprobs=0) for each in prompts]
    found = engine_of(runner, 2, 8, 9).complete(asked)
    for prompt, completion in zip(prompts, found, strict=True):
        tokens, log_probs = their_greedy(theirs, prompt, 12)
        assert list(completion.tokens) == tokens
        ours = torch.tensor([score.logprob for score in completion.scores])
        expected = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance(shape))


def test_beams_against_transformers(runner, shape):
    theirs, draw = their_model(shape), random.Random(6)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(n)] for n in (3, 12)]
    asked = [
        GenerationRequest((*each,), StopRules(9, frozenset([7])), beams=Beams(4, 0.7))
        for each in prompts
    ]
    for prompt, completion in zip(
        prompts, engine_of(runner, 9, 20, 9).complete(asked), strict=True
    ):
        made = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=9, num_beams=4, num_return_sequences=4,
            length_penalty=0.7, eos_token_id=7, pad_token_id=0, do_sample=False,
            early_stopping=False, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        begin = 1 if runner.max_prompt is not None else len(prompt)
        for beam, theirs_L, score in zip(
            completion.beams, made.sequences, made.sequences_scores, strict=True
        ):
            tokens = theirs_L[begin:].tolist()
            assert list(beam.tokens) == tokens[: len(beam.tokens)]
            # Filled up with padding, or with the token that ends texts.
            assert {*tokens[len(beam.tokens) :]} <= {0, 7}
            assert beam.score == pytest.approx(float(score), abs=2 * tolerance(shape))
