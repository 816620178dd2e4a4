"""The runner on one process, against transformers, and what must not change its numbers."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from configs import run_config
from generating import PROMPTS, SHAPES, play, same, save_theirs, their_greedy
from generating import their_model as make_theirs

from megatron.families import family_of
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.inference.load import model_of
from megatron.inference.runner import PagedRunner
from megatron.inference.stages import Stages

COUNT = 12
TOKENIZER = SimpleNamespace(pad=0, bos=0)
their_model = cache(make_theirs)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes a runner of a shape, and its model."""
    loaded = {}

    def make(shape, pages=60, page_size=8, dtype=torch.float32):
        if (shape, dtype) not in loaded:
            folder = save_theirs(tmp_path_factory.mktemp("theirs") / shape, shape)
            source = HuggingFaceFolder(folder)
            loaded[shape, dtype] = source.model, model_of(source, dtype, torch.device("cpu"))
        config, model = loaded[shape, dtype]
        generation = family_of(config.family).generation(run_config(model=config), TOKENIZER)
        stages = Stages.alone(model, config.hidden_size)
        return PagedRunner(stages, config, generation, pages, page_size)

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_against_transformers(shape, made):
    """Texts of several lengths under way together, prompts in pieces."""
    texts = play(made(shape), PROMPTS, COUNT, chunk=5, together=4)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        tokens, log_probs = their_greedy(their_model(shape), prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=5e-6)
    assert len({tuple(text.tokens) for text in texts}) > 2


@pytest.mark.parametrize("shape", SHAPES)
def test_alone_in_a_crowd_and_in_pieces(shape, made):
    runner = made(shape)
    crowd = play(runner, PROMPTS, COUNT)
    alone = [play(runner, [prompt], COUNT, shuffled=False)[0] for prompt in PROMPTS]
    assert same(crowd, alone)
    assert same(play(runner, PROMPTS, COUNT, chunk=3, together=3), alone)
