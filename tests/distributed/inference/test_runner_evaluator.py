"""Scores of prompts against those of evaluations and of transformers, and what is refused, in every
layout."""

from pathlib import Path

import pytest
import torch
from generation_models import PROMPTS, play, save_theirs, their_model, tolerance
from pool import RankError

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import for_generation, opened_runner, runner_of
from megatron.apps.tasks.harness.scoring import TextScorer, TokenRequest
from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError
from megatron.features.evaluation.checkpoints import opened_checkpoint
from megatron.run.run import RunToolParser

LAYOUTS = {
    "tp1": [],
    "tp2": ["--tensor-model-parallel-size", "2"],
    "tp2-sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}
TEXTS = [prompt for prompt in PROMPTS if len(prompt) > 1]


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "gemma2"
    return save_theirs(folder, "gemma2")


def parsed(load: Path, *flags: str):
    argv = ["--load", str(load), "--kv-cache-gib", "0.001", *flags]
    argv += ["--make-vocab-size-divisible-by", "1"]  # both tensor-parallel ranks have tokens
    if "--tokenizer-type" not in flags:
        argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]
    return RunToolParser(CacheConfig, None).parse(argv)


def both(load: Path, flags: list[str], processes: int) -> tuple[list, list] | None:
    """For the pool: log-probabilities of the tokens by the runner, and by an evaluation."""
    cache, settings = parsed(load, *flags)
    with opened_checkpoint(for_generation(settings), processes, "a test") as found:
        tokenizer = found.run.tokenizer
        scorer = TextScorer(found.engine, tokenizer, batch_size=4)
        requests = [
            TokenRequest(text[:end], text[end : end + 1])
            for text in TEXTS
            for end in range(1, len(text))
        ]
        evaluated = [answer.log_prob for answer in scorer.answers(requests)]
        runner = runner_of(found.engine, tokenizer, cache)
        if not runner.main:
            runner.follow()
            return None
        texts = play(runner, TEXTS, 1, chunk=5)
        runner.close()
        return [x for text in texts for x in text.prompt_log_probs.tolist()], evaluated


def check(pool, load: Path, layout: str) -> None:
    size = 1 if layout == "tp1" else 2
    found, evaluated = pool.run(size, both, load, LAYOUTS[layout], size)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(evaluated), rtol=0, atol=1e-6)
    model, expected = their_model("gemma2"), []
    for text in TEXTS:
        with torch.inference_mode():
            log_probs = model(torch.tensor([text])).logits[0].log_softmax(-1)
        expected += log_probs[range(len(text) - 1), text[1:]].tolist()
    assert found == pytest.approx(expected, rel=0, abs=tolerance("gemma2"))


def test_scores_are_those_of_an_evaluation(pool, load):
    check(pool, load, "tp2")


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_in_every_layout(layout, pool, load):
    check(pool, load, layout)


def opened(load: Path, flags: list[str], processes: int) -> str | None:
    """For the pool: what is wrong."""
    cache, settings = parsed(load, *flags)
    try:
        with opened_runner(settings, processes, cache):
            return None
    except (ConfigError, CheckpointError, OSError) as error:
        return str(error)


def test_data_parallel_processes_are_refused(pool, load):
    for said in pool.run(2, opened, load, [], 2):
        assert "2 processes for a model over 1: generation has no data-parallel replicas" in said


def test_too_little_memory(pool, load):
    flags = ["--kv-cache-gib", "1e-6"]
    (said,) = pool.run(1, opened, load, flags, 1)
    assert said.startswith("--kv-cache-gib 1e-06 has room for 0 pages of 64 positions")


def fails(load: Path, flags: list[str], processes: int) -> None:
    """For the pool: rank 1 fails in the middle of a step."""
    cache, settings = parsed(load, *flags)
    with opened_checkpoint(settings, processes, "a test") as found:
        runner = runner_of(found.engine, found.run.tokenizer, cache)
        if not runner.main:
            runner.memory.clear = None  # type: ignore[method-assign]
            runner.follow()
        play(runner, TEXTS, 1)


def test_an_error_on_one_rank_ends_all(pool, load):
    with pytest.raises(RankError, match="'NoneType' object is not callable") as caught:
        pool.run(2, fails, load, LAYOUTS["tp2"], 2)
    assert "still running" not in str(caught.value)
