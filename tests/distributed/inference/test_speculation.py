"""Drafts in every layout: texts and scores have the bits of those without, in the same layout."""

import random

import pytest
from gpt_checkpoints import gpt_config, random_gpt, write_checkpoint  # noqa: F401
from samples import sampled

from megatron.apps.generation.memory import ServedConfig
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.run.run import RunToolParser

VOCAB = 6
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()),
}
METHODS = ("mtp", "ngram")
SAMPLE = {("tp2-pp2", "mtp")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gpt_config, random_gpt, write_checkpoint):  # noqa: F811
    config = gpt_config(
        VOCAB,
        llama=True,
        num_query_groups=2,
        mtp_num_layers=2,
        seq_length=100,
        max_position_embeddings=100,
    )
    return write_checkpoint(tmp_path_factory.mktemp("ahead"), config, random_gpt(config)).parent


def asked():
    """Longer than a page, some with the same beginning."""
    draw = random.Random(8)
    start = [draw.randrange(VOCAB) for _ in range(70)]
    for number, length in enumerate((1, 60, 66, 66, 9)):
        prompt = (*start[:length], number)
        sampling = Sampling(greedy=not number, seed=number, temperature=0.6)
        yield GenerationRequest(prompt, StopRules(25 - number), sampling, logprobs=2)


def texts(folder, layout, processes, drafts):
    """For the pool: completions, and accepted and drafted tokens, of the main rank."""
    argv = ["--load", str(folder), "--kv-cache-gib", "0.01", *layout, *drafts]
    argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB - 1)]
    config, settings = RunToolParser(ServedConfig, None).parse(argv)
    with opened_runner(settings, processes, config) as opened:
        if opened is None:
            return None
        limits = EngineLimits(3, 29, 10, config.num_speculative_tokens)
        engine = GenerationEngine(opened.runner, opened.tokenizer, limits)
        actual = [(each.tokens, each.scores) for each in engine.complete(asked())]
        return actual, engine.stats.accepted_tokens, engine.stats.draft_tokens


CASES = [(layout, method) for layout in LAYOUTS for method in METHODS]


@pytest.mark.parametrize(("layout", "method"), sampled(CASES, lambda case: case in SAMPLE))
def test_texts_are_those_without(pool, folder, layout, method):
    processes, flags = LAYOUTS[layout]
    plain, *_ = pool.run(processes, texts, folder, flags, processes, [])
    drafts = ["--num-speculative-tokens", "3", "--speculative-method", method]
    actual, *others = pool.run(processes, texts, folder, flags, processes, drafts)
    assert others == [None] * (processes - 1)
    assert actual[0] == plain[0]
    assert plain[1:] == (0, 0) and 0 < actual[1] < actual[2]
