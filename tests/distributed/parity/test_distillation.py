"""A student with its teacher in every layout against one process, in float64."""

import pytest
from against_one_process import difference, reference
from samples import sampled
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-query-groups 2"
).split()
"""Several ranks have tokens, and not the first all."""
STUDENT = [
    *(*TINY, "--num-layers", "8", "--micro-batch-size", "2", "--train-iters", "1", *NO_DROPOUT)
]
TERMS = "--kd --kd-alpha-ce 0.6 --kd-beta-ce 1.5 --kd-temp 2".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, pool):
    """A llama of other sizes than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    sizes = "--num-layers 9 --hidden-size 48 --num-attention-heads 4 --train-iters 2".split()
    pool.run(1, train, [*TINY, *sizes, *LLAMA, *NO_DROPOUT, "--save", str(folder)])
    return str(folder)


@pytest.mark.parametrize("data", sampled(["plain", "documents"], lambda name: name == "documents"))
@pytest.mark.parametrize(
    "layout",
    sampled((*LAYOUTS, *CONTEXT_LAYOUTS), "tp2-sp-pp2-interleaved".__eq__),
)
def test_against_one_process(pool, teacher, layout, data):
    parsed = parse_layout(layout)
    count = parsed.fewest_micro_batches * 2 * parsed.data
    argv = [*STUDENT, "--global-batch-size", str(count), *TERMS, "--load-teacher", teacher]
    if data == "documents":
        argv += "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
    assert difference(pool, parsed.processes, argv, flags_for(parsed)) is None


def test_the_teacher_acts(teacher):
    argv = [*STUDENT, "--load-teacher", teacher]
    taught, alone = reference(*argv, *TERMS), reference(*argv, "--kd", "--kd-beta-ce", "0")
    assert abs(taught.loss - alone.loss) > 1e-2
