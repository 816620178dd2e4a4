"""Generation with experts in layouts: the texts of one process, and the same bits in company."""

import pytest
import torch
from generation_models import PROMPTS, play, same
from training_jobs import TINY, train

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import opened_runner
from megatron.config import ConfigError
from megatron.run.run import RunToolParser

TP2 = ["--tensor-model-parallel-size", "2"]
WHOLE, EP2 = ["--expert-tensor-parallel-size", "1"], ["--expert-model-parallel-size", "2"]
LAYOUTS = {
    "tp2-sp": (2, [*TP2, "--sequence-parallel"]),
    "tp2-whole": (2, [*TP2, *WHOLE]),
    "tp2-folded": (2, [*TP2, *WHOLE, *EP2]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}
SHORT = [[token % 90 for token in prompt[:10]] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    """A model whose experts have a capacity in training."""
    folder = str(tmp_path_factory.mktemp("experts"))
    model = (
        "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 40 --init-method-std 0.2 --swiglu "
        "--moe-expert-capacity-factor 1 --moe-shared-expert-intermediate-size 16 --train-iters 1"
    )
    pool.run(1, train, [*TINY, *model.split(), "--save", folder])
    return folder


def generated(load, layout, processes):
    """For the pool: the texts of the main rank together in pieces, and each alone."""
    argv = ["--load", load, "--kv-cache-gib", "0.001", *layout]
    config, settings = RunToolParser(CacheConfig, None).parse(argv)
    try:
        with opened_runner(settings, processes, config) as opened:
            if opened is None:
                return None
            runner = opened.runner
            together = play(runner, SHORT, 6, chunk=3, together=4)
            return together, [play(runner, [prompt], 6)[0] for prompt in SHORT]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    "layout",
    [n if n == "tp2-folded" else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS],
)
def test_texts_of_layouts(layout, pool, folder):
    size, flags = LAYOUTS[layout]
    ((one, _),) = pool.run(1, generated, folder, [], 1)
    (together, alone), *_ = pool.run(size, generated, folder, flags, size)
    assert same(together, alone)
    for mine, expected in zip(together, one, strict=True):
        assert mine.tokens == expected.tokens
        torch.testing.assert_close(mine.log_probs, expected.log_probs, rtol=0, atol=5e-6)


def test_experts_over_replicas_are_refused(pool, folder):
    for message in pool.run(2, generated, folder, EP2, 2):
        assert "--expert-model-parallel-size 2" in message
        assert "--expert-tensor-parallel-size 1" in message
