"""Generation with latent attention in layouts: the texts of one process, the same bits in company,
and the same memory on every tensor-parallel rank."""

import pytest
import torch
from generation_models import PROMPTS, play, same
from training_jobs import TINY, train

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import opened_runner
from megatron.run.run import RunToolParser

LAYOUTS = {
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp4": (4, ["--tensor-model-parallel-size", "4"]),
}
SHORT = [[token % 90 for token in prompt[:10]] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("latent"))
    model = (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --init-method-std 0.2 --train-iters 1"
    )
    pool.run(1, train, [*TINY, *model.split(), "--save", folder])
    return folder


def generated(load, layout, processes):
    """For the pool: the texts of the main rank together in pieces, each alone, and the bytes of a
    page."""
    argv = ["--load", load, "--kv-cache-gib", "0.001", *layout]
    config, settings = RunToolParser(CacheConfig, None).parse(argv)
    with opened_runner(settings, processes, config) as opened:
        if opened is None:
            return None
        runner = opened.runner
        together = play(runner, SHORT, 6, chunk=3, together=4)
        alone = [play(runner, [prompt], 6)[0] for prompt in SHORT]
        return together, alone, runner.memory.shape.bytes


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_of_layouts(layout, pool, folder):
    size, flags = LAYOUTS[layout]
    ((one, _, bytes_of_one),) = pool.run(1, generated, folder, [], 1)
    (together, alone, page), *_ = pool.run(size, generated, folder, flags, size)
    # The order of gloo's sums over more than two ranks depends on the number of rows.
    assert same(together, alone) or layout == "tp4"
    for mine, expected in zip(together, one, strict=True):
        assert mine.tokens == expected.tokens
        torch.testing.assert_close(mine.log_probs, expected.log_probs, rtol=0, atol=1e-5)
    assert page == (bytes_of_one // 2 if layout == "pp2" else bytes_of_one)
