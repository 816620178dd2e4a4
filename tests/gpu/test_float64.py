"""One step in float64 on a GPU and on the CPU: any difference beyond rounding is an error."""

import pytest
from gpu_runs import CPU, TINY, forget_engines, own_environment

from megatron.apps.parity.gradients import first_difference, gradients, reference_gradients
from megatron.families import spec_of
from megatron.model import rope
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

KINDS = {
    "llama": [],
    "documents": ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"],
    "recomputed": ["--recompute-granularity", "full"],
    "grouped": ["--num-query-groups", "2", "--qk-layernorm"],
}
# Of FlexAttention's masks padding sees padding, so that the outputs there are others.
BERT = ["--model-family", "bert", "--attention-backend", "eager"]
FAMILIES = {
    "bert": BERT,
    "bert post-norm": [*BERT, "--apply-residual-connection-post-layernorm"],
    "retro": [
        *("--model-family", "retro", "--retro-gpt-chunk-length", "8"),
        *("--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0"),
    ],
    "t5": ["--model-family", "t5", "--decoder-seq-length", "16"],
    "t5 relative": [
        *("--model-family", "t5", "--decoder-seq-length", "16"),
        *("--position-embedding-type", "relative", "--query-pre-attn-scalar", "1"),
        *("--normalization", "RMSNorm", "--disable-bias-linear", "--scale-head-input"),
    ],
}
MASKED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --short-seq-prob 0.4 "
    "--num-workers 0 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --peak-tflops 1"
).split()


@pytest.fixture(autouse=True)
def angles_of_the_cpu(monkeypatch):
    """Each device rounds the tables of rotary positions in its own way."""
    made = rope._table
    monkeypatch.setattr(
        rope,
        "_table",
        lambda rotation, long, device, dtype: tuple(
            x.to(device) for x in made(rotation, long, CPU, dtype)
        ),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_those_of_the_cpu(family):
    compare([*FAMILIES[family], *MASKED])


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_cpu(kind):
    compare([*TINY, *KINDS[kind]])


def compare(argv: list[str]) -> None:
    """Raises AssertionError if a loss or a gradient differs by more than rounding."""
    reference = reference_gradients(argv)
    with own_environment():
        record = gradients(argv)
    forget_engines()
    config = parse_run(None, argv).config
    layers = spec_of(config.model, config.parallel).layers(TensorParallel())
    assert first_difference([record], reference, layers) is None
