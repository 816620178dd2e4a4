"""A bit that changes in one copy of a run's state is found before it is saved, and its rank is
named: at every ZeRO stage, dtype and layout. Copies that are equal are never reported."""

import contextlib
import json
import re
from unittest import mock

import pytest
from samples import sampled
from training_jobs import LAYOUTS, TINY

from megatron.apps.parity import runs
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.folder import complete_tags
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.steps.checksum import bits_of
from megatron.features.resilience.steps.replicas import Replicas
from megatron.model.mlp import MLP
from megatron.training.stopping import TrainingStopped
from megatron.util.errors import FaultError

STEPS, BAD, PLACE = 4, 3, 5
FLAGS = [*TINY, "--train-iters", str(STEPS), "--save-interval", "1"]
WORD, NORM, UP = (
    "embedding.word_embeddings.weight",
    "layers.1.attention_norm.weight",
    "layers.1.mlp.up.weight",
)
FP16 = ["--fp16", "--initial-loss-scale", "65536"]
TP, PP = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
DELAYED = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"]


def stage(number, *flags):
    return ["--zero-stage", str(number), *flags]


TIE = "either may be wrong"
MAIN = "the model's weights are not its main weights"
FLIPS = {
    # ranks, flags, what, parameter, rank, bit: a part of the message
    "stage 0": (2, stage(0), "weight", WORD, 1, 30, rf"rank 1 \(.*\) differs from rank 0.*{TIE}"),
    "stage 0, four": (
        4,
        stage(0),
        "weight",
        WORD,
        2,
        0,
        r"rank 2 \(\S+\) differs from rank 0 .*1 ",
    ),
    "stage 0, moment": (4, stage(0), "exp_avg", UP, 3, 12, r"rank 3 \(\S+\) differs from rank 0"),
    "stage 0, norm, tp2": (
        2,
        stage(0, *TP),
        "weight",
        NORM,
        1,
        22,
        rf"rank 1 .* from rank 0.*{TIE}",
    ),
    "stage 0, norm, tp2 dp2": (4, stage(0, *TP), "weight", NORM, 2, 22, r"rank 2 \(\S+\) differs"),
    "stage 0, cut, tp2 dp2": (
        4,
        stage(0, *TP),
        "weight",
        UP,
        2,
        22,
        rf"rank 2 .* from rank 0 .*{TIE}",
    ),
    "stage 0, tied, pp2": (
        2,
        stage(0, *PP),
        "weight",
        WORD,
        1,
        3,
        rf"rank 1 .* from rank 0.*{TIE}",
    ),
    "stage 0, fp16": (
        4,
        stage(0, *FP16),
        "weight",
        UP,
        2,
        14,
        r"rank 2 \(\S+\) differs from rank 0",
    ),
    "stage 0, main, fp16": (2, stage(0, *FP16), "main weight", WORD, 0, 29, rf"on rank 0 .*{MAIN}"),
    "stage 0, moment, fp16": (4, stage(0, *FP16), "exp_avg", UP, 3, 12, r"rank 3 \(\S+\) differs"),
    "stage 0, one process, fp16": (
        1,
        stage(0, *FP16),
        "main weight",
        UP,
        0,
        29,
        rf"on rank 0 .*{MAIN}",
    ),
    "stage 1": (
        2,
        stage(1),
        "weight",
        WORD,
        1,
        30,
        r"rank 1 \(\S+\) differs from rank 0 .* in 1 of",
    ),
    "stage 1, first": (2, stage(1), "weight", WORD, 0, 30, r"rank 0 \(\S+\) differs from rank 1"),
    "stage 1, main": (2, stage(1), "main weight", WORD, 0, 30, rf"on rank 0 .*{MAIN}"),
    "stage 1, bf16": (
        2,
        stage(1, "--bf16"),
        "weight",
        UP,
        0,
        14,
        r"rank 0 \(\S+\) differs from rank 1",
    ),
    "stage 1, main, bf16": (
        2,
        stage(1, "--bf16"),
        "main weight",
        WORD,
        0,
        30,
        rf"on rank 0 .*{MAIN}",
    ),
    "stage 1, tied, pp2": (
        2,
        stage(1, *PP),
        "exp_avg",
        WORD,
        1,
        3,
        rf"rank 1 .* from rank 0.*{TIE}",
    ),
    "stage 1, norm, tp2": (2, stage(1, *TP), "exp_avg_sq", NORM, 1, 3, rf"rank 1 .* rank 0.*{TIE}"),
    "stage 1, one process": (
        1,
        stage(1, "--bf16"),
        "main weight",
        UP,
        0,
        30,
        rf"on rank 0 .*{MAIN}",
    ),
    "stage 2, fp16": (
        2,
        stage(2, *FP16),
        "weight",
        UP,
        1,
        14,
        r"rank 1 \(\S+\) differs from rank 0",
    ),
    "stage 2, main, fp16": (2, stage(2, *FP16), "main weight", WORD, 0, 29, rf"on rank 0 .*{MAIN}"),
    "stage 3": (2, stage(3), "weight", UP, 1, 30, rf"on rank 1 .*{MAIN}"),
    "stage 3, main, bf16": (
        2,
        stage(3, "--bf16"),
        "main weight",
        UP,
        0,
        30,
        rf"on rank 0 .*{MAIN}",
    ),
    "offloaded": (2, ["offload"], "main weight", WORD, 0, 30, rf"on rank 0 .*{MAIN}"),
}
SAMPLE = {"stage 0, four", "stage 1, main, bf16", "stage 1, tied, pp2"}


def run(argv, under, *args):
    """Trains in a context; the message of the FaultError that ended it."""
    with under(*args):
        try:
            runs.train(argv)
        except FaultError as error:
            return str(error)
    return None


def flipped(kind, name, rank, bit):
    """A context: after a step one bit of one element of one rank's state of a parameter changes."""
    real, done = TrainEngine.train_step, iter(range(1, STEPS + 1))

    def train_step(self, *args):
        result = real(self, *args)
        if next(done) == BAD and self.mesh.world.rank == rank:
            param = next(param for param, found in self.names.items() if found == name)
            if kind == "weight":
                flat = (param.ds_tensor if self.stage == 3 else param).detach().view(-1)
            else:
                own = next(own for own in owned_slices(self) if own.param is param)
                flat = own.get("weight" if kind == "main weight" else kind)
            bits = bits_of(flat)
            assert bits.data_ptr() == flat.data_ptr()
            bits[PLACE] ^= 1 << bit
        return result

    return mock.patch.object(TrainEngine, "train_step", train_step)


def completed(flags, tmp_path):
    if flags == ["offload"]:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        path = tmp_path / "offload.json"
        path.write_text(json.dumps({"zero_optimization": zero}))
        return ["--deepspeed_config", str(path)]
    return flags


@pytest.mark.parametrize("name", sampled(FLIPS, SAMPLE.__contains__))
def test_a_changed_bit_is_not_saved(pool, tmp_path, name):
    size, flags, kind, parameter, rank, bit, words = FLIPS[name]
    save = tmp_path / "save"
    argv = [*FLAGS, *completed(flags, tmp_path), "--save", str(save)]
    said = pool.run(size, run, argv, flipped, kind, parameter, rank, bit)
    assert len(set(said)) == 1 and said[0] is not None, said
    shown = "weight" if kind == "main weight" else kind
    words = rf"after iteration {BAD} .*{re.escape(parameter)} \({shown}\): {words}"
    assert re.search(words, said[0]), said[0]
    assert re.search(r"in 1 of [\d,]+ elements, the first at \[", said[0]), said[0]
    assert f"the last good checkpoint is {save}/global_step{BAD - 1}" in said[0]
    assert complete_tags(save) == [f"global_step{n}" for n in range(1, BAD)]


EQUAL = [
    *((layout, 0, []) for layout in LAYOUTS),
    *((layout, 1, ["--bf16"]) for layout in LAYOUTS),
    *(
        (layout, number, flags)
        for layout in ("dp2", "dp4", "tp2-dp2", "tp2-sp-dp2")
        for number in (1, 2, 3)
        for flags in ([], ["--bf16"], FP16, ["--optimizer", "sgd", "--sgd-momentum", "0.5"])
    ),
    *((layout, 0, FP16) for layout in ("dp2", "tp2-sp-dp2", "pp2-dp2")),
    ("dp2", 1, ["--bf16", "--accumulate-allreduce-grads-in-fp32"]),
    ("dp2", 2, ["--bf16", "--use-precision-aware-optimizer", "--exp-avg-sq-dtype", "bf16"]),
    ("tp2-sp-dp2", 1, ["--bf16", *DELAYED]),
    ("tp2-dp2", 0, ["--num-query-groups", "1", "--qk-layernorm"]),
    ("tp4-sp", 1, ["--num-query-groups", "1", "--qk-layernorm", "--bf16"]),
    ("dp2", 1, ["--lora", "--lora-rank", "2"]),
    ("tp2", 1, ["--lora", "--lora-rank", "2", "--qlora"]),
    ("dp2", 3, ["--lora", "--lora-rank", "2"]),
]


def compared(argv):
    """The number of tensors that a run compares after every step, of which none differs."""
    counts, real = [], Replicas.difference

    def difference(self):
        counts.append(len(self._copies))
        return real(self)

    with mock.patch.object(Replicas, "difference", difference):
        runs.train(argv)
    return counts


@pytest.mark.parametrize(
    ("layout", "number", "flags"),
    sampled(EQUAL, [("tp2-sp-pp2", 0, []), ("dp2", 2, FP16)].__contains__),
)
def test_equal_copies_are_not_reported(pool, layout, number, flags):
    parsed = parse_layout(layout)
    batch = str(2 * parsed.fewest_micro_batches * parsed.data)
    argv = [*TINY, "--num-layers", "8", "--global-batch-size", batch, *flags_for(parsed), *flags]
    argv += ["--zero-stage", str(number), "--train-iters", "3", "--check-replicas-interval", "1"]
    found = pool.run(parsed.processes, compared, argv)
    # Stages that nobody has copies of share what is no parameter, and the outer ones an embedding.
    alone = number == 0 and parsed.processes == parsed.pipeline
    for counts in found:
        assert len(counts) == 3 and min(counts) > (0 if alone else 3)
    if "dualpipev" not in layout:  # has both ends in one stage
        assert min(found[0] + found[-1]) > 3


def ruined_weight(rank):
    """A context: after a step one weight of one rank's model is not a number."""
    real, done = TrainEngine.train_step, iter(range(1, STEPS + 1))

    def train_step(self, *args):
        result = real(self, *args)
        if next(done) == BAD and self.mesh.world.rank == rank:
            param = next(param for param, found in self.names.items() if found == UP)
            param.data.view(-1)[PLACE] = float("nan")
        return result

    return mock.patch.object(TrainEngine, "train_step", train_step)


def ended(argv, under, *args):
    """How a run in a context ended: the class of its error, and the message."""
    with under(*args):
        try:
            runs.train(argv)
        except (FaultError, TrainingStopped) as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.proof
def test_a_rank_with_a_weight_that_is_not_a_number_is_named(pool):
    """Found by the next step, whose loss is not finite. ZeRO 1 to 3 make the weights again from
    the main weights, whether or not those change; then the rank's own loss tells."""
    argv = [*TINY, "--train-iters", str(STEPS), "--zero-stage"]
    for kind, said in pool.run(2, ended, [*argv, "1"], ruined_weight, 1):
        assert kind == "TrainingStopped" and re.search(r"on rank 1 \(\S+\) alone", said)
    argv += ["0"]
    for kind, said in pool.run(2, ended, argv, ruined_weight, 1):
        assert kind == "FaultError"
        words = rf"iteration {STEPS} .*{UP} \(weight\): rank 1 \(\S+\) differs from rank 0"
        assert re.search(words, said), said


@contextlib.contextmanager
def product_not_finite(rank):
    """The products of one rank's MLPs are not numbers in the last step."""
    real, forward, done, wrong = TrainEngine.train_step, MLP.forward, iter(range(1, 99)), [False]

    def train_step(self, *args):
        wrong[0] = next(done) == STEPS and self.mesh.world.rank == rank
        return real(self, *args)

    def not_finite(self, x):
        return forward(self, x) * (float("nan") if wrong[0] else 1.0)

    with (
        mock.patch.object(TrainEngine, "train_step", train_step),
        mock.patch.object(MLP, "forward", not_finite),
    ):
        yield


@pytest.mark.parametrize("number", sampled([0, 1, 2, 3], (2).__eq__))
def test_the_rank_whose_loss_is_not_a_number_is_named(pool, number):
    argv = [*TINY, "--train-iters", str(STEPS), "--zero-stage", str(number)]
    for kind, said in pool.run(2, ended, argv, product_not_finite, 1):
        assert kind == "TrainingStopped"
        words = r"the loss is nan at .*, on rank 1 \(\S+\) alone; the weights"
        assert re.search(words, said), said
