"""Training on a base in 4 bits: that is training on the base's rounded numbers, in every layout; a
run that is stopped continues bit by bit."""

import numpy as np
import pytest
import torch
from samples import sampled
from training_jobs import TINY, train

from megatron.checkpoint.source import open_checkpoint
from megatron.features.adapters.nf4 import quantise
from megatron.formats.conversion.output import write_checkpoint

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 192 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0"
).split()
FLAGS = [*TINY, *SHAPE, "--seq-length", "16"]
LORA = ["--lora", "--lora-rank", "4", "--lora-targets", "q_proj", "down_proj", "up_proj"]
LAYOUTS = {
    "alone": (1, ""),
    "zero1-bf16": (1, "--zero-stage 1 --bf16"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-zero2": (2, "--zero-stage 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
DEFAULT = ("alone",)
FUSED = {"qkv": [128, 64, 64], "up": [192, 192], "proj": [128], "down": [128]}
"""Rows of the matrices in each linear layer."""


@pytest.fixture(scope="module")
def bases(pool, tmp_path_factory):
    """A base, and the same with the numbers that its linear layers have in 4 bits."""
    folder = tmp_path_factory.mktemp("bases")
    pool.run(1, train, [*FLAGS, "--train-iters", "1", "--save", str(folder / "base")])
    source = open_checkpoint(folder / "base")
    exact = source.tensor

    def rounded(name, kind="weight"):
        values = exact(name, kind)
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part not in FUSED:
            return values
        matrices = [each.contiguous() for each in values.split(FUSED[part])]
        for matrix in matrices:
            quantise(matrix, double=True).write(matrix)
        return torch.cat(matrices)

    source.tensor = rounded
    write_checkpoint(folder / "rounded", source, moments=False)
    return folder / "base", folder / "rounded"


@pytest.mark.parametrize("layout", sampled(LAYOUTS, DEFAULT.__contains__))
def test_layouts_train_on_the_rounded_base(pool, bases, layout):
    size, extra = LAYOUTS[layout]
    argv = [*FLAGS, "--train-iters", "4", *LORA]
    bf16 = ["--bf16", "--zero-stage", "1"] if "bf16" in extra else []
    (reference,) = pool.run(1, train, [*argv, *bf16, "--pretrained-checkpoint", str(bases[1])])
    (other,) = pool.run(1, train, [*argv, *bf16, "--pretrained-checkpoint", str(bases[0])])
    quantised = ["--qlora", "--pretrained-checkpoint", str(bases[0]), *extra.split()]
    for record in pool.run(size, train, [*argv, *quantised]):
        close = 0 if size == 1 else 2e-6
        assert np.abs(np.subtract(record.losses, reference.losses)).max() <= close
        assert record.norms == pytest.approx(reference.norms, rel=close)
    assert np.abs(np.subtract(other.losses, reference.losses)).max() > 1e-4


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["zero1-bf16", "tp2-sp", "pp2", "dp2-zero3"])
def test_resume_is_bitwise(pool, bases, layout, tmp_path):
    size, extra = LAYOUTS[layout]
    argv = [*FLAGS, "--train-iters", "6", *LORA, "--qlora", *extra.split()]
    argv += ["--pretrained-checkpoint", str(bases[0])]
    whole = pool.run(size, train, argv)
    saved = ["--save", str(tmp_path), "--load", str(tmp_path)]
    first = pool.run(size, train, [*argv, *saved, "--exit-interval", "3"])
    second = pool.run(size, train, [*argv, *saved])
    for rank in range(size):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert all(np.array_equal(second[rank].state[k], v) for k, v in whole[rank].state.items())
