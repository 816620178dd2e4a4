"""Examples that are weighed, with noise and learning-rate groups: every layout trains as one
process does, and a run that is stopped continues as if it had not been."""

import json
from functools import cache
from itertools import product

import numpy as np
import pytest
from against_one_process import check_training
from samples import sampled
from training_jobs import CONTEXT_LAYOUTS, TINY, gradients, train

from megatron.apps.parity.gradients import first_difference, reference_gradients
from megatron.apps.parity.layouts import flags_for, parse_layout

LAYOUTS = {
    "alone": (1, "--zero-stage 1"),
    "dp2-zero2-micro2": (2, "--zero-stage 2 --micro-batch-size 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-dp2-zero1": (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    **{
        f"{layout}-zero{stage}": (
            parse_layout(layout).processes,
            " ".join(flags_for(parse_layout(f"{layout}-zero{stage}"))),
        )
        for layout, stage in (("cp2", 1), ("cp2", 2), ("cp2", 3), ("cp2-dp2", 3), ("cp2-pp2", 1))
    },
}
DEFAULT = ("pp2",)
NOISE = "--neftune-noise-alpha 5"
GROUPS = "--lr-group embedding.*=0.1 layers.[01].*=0.5 layers.2.mlp.*=0"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Examples of very different lengths, padded to the longest of a micro batch."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(60):
            lengths = rng.integers(1, 8, 2)
            prompt, answer = (" ".join(map(str, rng.integers(0, 99, n))) for n in lengths)
            file.write(json.dumps({"prompt": prompt, "completion": f" {answer}"}) + "\n")
    return [
        *(flag for flag in TINY if flag != "--mock-data"),
        *"--num-layers 4 --position-embedding-type rope".split(),
        *"--hidden-dropout 0 --attention-dropout 0 --train-iters 6 --log-token-accuracy".split(),
        *["--sft", "--data-path", str(folder / "pairs.jsonl"), "--split", "1,0,0"],
        *["--sft-loss-weights", "examples", *GROUPS.split()],
    ]  # fmt: skip


@pytest.mark.parametrize("layout", sampled(LAYOUTS, DEFAULT.__contains__))
def test_layouts_against_one_process(pool, flags, layout):
    size, extra = LAYOUTS[layout]
    # Noise is drawn for micro batches, as dropout masks are.
    noise = [] if "--micro-batch-size" in extra else NOISE.split()
    check_training(pool, size, [*flags, *noise], extra.split(), fall=None)


@cache
def one_process(*argv):
    return reference_gradients(list(argv))


WEIGHTS = ("micro-batches", "tokens", "examples")


@pytest.mark.parametrize(
    ("layout", "weights"),
    sampled(list(product(CONTEXT_LAYOUTS, WEIGHTS)), {("cp2", "examples")}.__contains__),
)
def test_gradients_of_parts_of_sequences(pool, flags, layout, weights):
    """Of examples and padding, in float64: the ranks of a context have different numbers of tokens
    that count, some of them none. Micro batches have two examples, whose numbers differ; layouts
    pad them to other lengths, so that hidden states are not compared."""
    parsed = parse_layout(layout)
    samples = 2 * parsed.fewest_micro_batches * parsed.data
    argv = [*flags, "--sft-loss-weights", weights, *NOISE.split(), "--micro-batch-size", "2"]
    argv += ["--global-batch-size", str(2 * samples), "--num-layers", "4"]
    expected = one_process(*argv)
    records = pool.run(parsed.processes, gradients, [*argv, *flags_for(parsed)])
    assert first_difference(records, expected, []) is None


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["alone", "dp2-zero3", "pp2", "tp2-sp", "cp2-zero3"])
def test_resume_is_bitwise(pool, flags, layout, tmp_path):
    size, extra = LAYOUTS[layout]
    argv = [*flags, *NOISE.split(), *extra.split()]
    whole = pool.run(size, train, argv)
    saved = ["--save", str(tmp_path), "--load", str(tmp_path)]
    first = pool.run(size, train, [*argv, *saved, "--exit-interval", "3"])
    second = pool.run(size, train, [*argv, *saved])
    for rank in range(size):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert second[rank].state.keys() == whole[rank].state.keys()
        assert all(np.array_equal(second[rank].state[k], v) for k, v in whole[rank].state.items())
