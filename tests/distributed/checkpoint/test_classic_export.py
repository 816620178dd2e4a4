"""Decoders of 2019 to 2023: from a folder of transformers through training in several layouts to a
folder again, which equals that of one process."""

import pytest
import torch
from generation_models import save_theirs
from tool_modules import load_program

from megatron.apps.parity.runs import train
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.huggingface.source import HuggingFaceFolder

pytestmark = pytest.mark.proof

RUN = (
    "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 60 --mock-data "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 3e-2 "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000 --hidden-dropout 0 "
    "--attention-dropout 0"
).split()
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
}


@pytest.fixture(scope="module", params=["gptj", "gpt_neo", "xglm"])
def alone(request, pool, tmp_path_factory):
    """The architecture, its folder, and the weights that one process trains."""
    place = tmp_path_factory.mktemp(request.param)
    base = save_theirs(place / "base", request.param)
    flags = ["--pretrained-checkpoint", str(base), "--save", str(place / "run")]
    pool.run(1, train, [*RUN, *flags])
    return request.param, base, open_checkpoint(place / "run")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trained_and_exported(alone, layout, pool, tmp_path, capsys):
    shape, base, expected = alone
    processes, words = LAYOUTS[layout]
    flags = ["--pretrained-checkpoint", str(base), "--save", str(tmp_path / "run")]
    pool.run(processes, train, [*RUN, *words.split(), *flags])
    load_program("tools/convert_checkpoint.py").main(
        ["to-hf", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "back")]
    )
    assert "tokens agree" in capsys.readouterr().out  # with those of transformers
    back, first = HuggingFaceFolder(tmp_path / "back"), HuggingFaceFolder(base)
    assert back.architecture.model_type == shape
    moved = 0.0
    for name in expected.names():
        found, wanted, start = (each.tensor(name) for each in (back, expected, first))
        if name.endswith("qkv.bias"):  # the gradient of all keys' bias is rounding
            parts = ((each.chunk(3)[0], each.chunk(3)[2]) for each in (found, wanted, start))
            found, wanted, start = map(torch.cat, parts)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
        moved = max(moved, float((found - start).abs().max()))
    assert moved > 0.01
