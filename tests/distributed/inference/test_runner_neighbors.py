"""Generation with the neighbours of chunks in every layout, against one process."""

import pytest
import torch
from generation_models import Played, play, same
from small_databases import CHUNK, VOCAB, chunk_database, nearest

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import for_generation, runner_of
from megatron.apps.retro.generation import ChunkNeighbors, RetrievingRunner
from megatron.engine.environment import distributed, training_device
from megatron.families import family_of, spec_of
from megatron.features.evaluation.checkpoints import evaluation_settings
from megatron.features.evaluation.evaluator import build_evaluator
from megatron.run.run import RunToolParser, run_of

PROMPTS = [[5, 7, 9], [60, 2, 2, 2, 8, 9, 11, 3, 3, 17, 20], [4] * 8, [1]]
PP2 = ["--pipeline-model-parallel-size", "2"]
LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, PP2),
    "tp2-sp-pp2": (
        4,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", *PP2],
    ),
    "virtual": (2, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "dualpipev": (2, [*PP2, "--pipeline-schedule", "dualpipev"]),
}
MODEL = (
    f"--model-family retro --num-layers 4 --retro-cross-attention-layers 1 3 "
    f"--retro-gpt-chunk-length {CHUNK} --hidden-size 32 --num-attention-heads 4 --seq-length 24 "
    f"--max-position-embeddings 24 --init-method-std 0.3 --kv-cache-gib 0.001 --lr 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}"
).split()


def generated(layout: list[str], processes: int) -> list[Played] | None:
    """For the pool: what the main rank gets of a model with the weights of its seed."""
    cache, settings = RunToolParser(CacheConfig, None).parse([*MODEL, *layout])
    run = run_of(evaluation_settings(for_generation(settings))[0], processes)
    with distributed(run.config.parallel) as mesh:
        spec = spec_of(run.config.model, run.config.parallel)
        engine = build_evaluator(run.config, spec, mesh, training_device())
        engine.initialise()
        runner = runner_of(engine, run.tokenizer, cache, retrieves=True)
        if not runner.main:
            runner.follow()
            return None
        of_chunks = family_of("retro").generation(run.config, None).neighbors
        neighbors = ChunkNeighbors(nearest, chunk_database(), of_chunks)
        retrieving = RetrievingRunner(runner, neighbors)
        texts = play(retrieving, PROMPTS, 10, chunk=5, together=3)
        retrieving.close()
        return texts


@pytest.fixture(scope="module")
def alone(pool):
    (texts,) = pool.run(1, generated, [], 1)
    return texts


def check(pool, alone, layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    found, *others = pool.run(processes, generated, flags, processes)
    assert others == [None] * (processes - 1)
    for text, expected in zip(found, alone, strict=True):
        assert text.tokens == expected.tokens
        torch.testing.assert_close(text.log_probs, expected.log_probs, rtol=0, atol=5e-5)
    assert layout != "pp2" or same(found, alone)


def test_the_neighbours_travel_between_stages(pool, alone):
    check(pool, alone, "pp2")


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, pool, alone):
    check(pool, alone, layout)
