"""Students in training: at every ZeRO stage as in plain torch, resumed bit for bit, in stages; and
what a teacher is not."""

import contextlib
import io

import numpy as np
import pytest
import torch
from against_one_process import check_training, trained_alone
from family_models import FAMILIES
from samples import sampled
from training_jobs import TINY, train, train_plainly

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import open_checkpoint
from megatron.engine.environment import distributed
from megatron.run.run import parse_run
from megatron.training.build import build_trainer

STEPS = 6
DROPOUT = {
    "all": [],
    "hidden": ["--attention-dropout", "0"],
    "none": ["--attention-dropout", "0", "--hidden-dropout", "0"],
}
STUDENT = [*TINY, "--train-iters", str(STEPS), "--lr-decay-style", "constant"]
TERMS = "--kd --kd-beta-ce 2 --kd-temp 2".split()
LARGER = (
    "--num-layers 5 --hidden-size 48 --swiglu --use-rotary-position-embeddings "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
).split()
FP16 = ["--fp16", "--initial-loss-scale", str(2.0**21), "--loss-scale-window", "2"]


@pytest.fixture(scope="module")
def teacher(pool, tmp_path_factory):
    """Flags that name a teacher."""
    folder = str(tmp_path_factory.mktemp("teacher"))
    pool.run(1, train, [*TINY, *LARGER, "--train-iters", "4", "--save", folder])
    return [*TERMS, "--load-teacher", folder]


LAYOUTS = [
    *(f"dp2-zero{stage}" for stage in range(4)),
    *("pp2-zero1", "pp4-zero0", "tp2-sp-pp2-zero1", "tp2-sp-dp2-zero2", "pp2-interleaved-zero0"),
    *("cp2-zero3", "cp2-dp2-zero1", "cp2-pp2-zero1"),
]


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_as_plain_torch_does(pool, teacher, layout):
    parsed = parse_layout(layout)
    layers = str(max(2, parsed.pipeline * parsed.chunks))
    flags = [*STUDENT, "--num-layers", layers, *DROPOUT[parsed.dropout], *teacher]
    check_training(pool, parsed.processes, flags, flags_for(parsed), fall=None)
    assert np.ptp(trained_alone(*flags)[0].losses) > 0.05, "the weights must change"


CASES = {
    "zero1-dp2": (2, ["--zero-stage", "1"]),
    "zero3-dp2-bf16": (2, ["--zero-stage", "3", "--bf16"]),
    "zero0-dp2-fp16": (2, ["--zero-stage", "0", *FP16]),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", *FP16]),
    "zero2-dp2-fp16": (2, ["--zero-stage", "2", *FP16]),
    "pp2-bf16": (2, ["--zero-stage", "1", "--bf16", "--pipeline-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}


def same(one, other):
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        assert np.array_equal(values, other.state[name]), name


@pytest.mark.parametrize("name", sampled(CASES, "pp2-bf16".__eq__))
def test_resume_is_bitwise(pool, teacher, tmp_path, name):
    """Also where the teacher's part ends after the checkpoint."""
    size, flags = CASES[name]
    flags = [*STUDENT, *teacher, *flags, "--kd-iters", "5"]
    whole = pool.run(size, train, [*flags, "--save", str(tmp_path), "--save-interval", "3"])
    load = ["--load", str(tmp_path), "--load-tag", "3"]
    second = pool.run(size, train, [*flags, *load])
    for one, end in zip(whole, second, strict=True):
        assert one.losses[3:] == end.losses
        same(one, end)


def test_stages_of_a_training(pool, teacher, tmp_path):
    """A student continues without its teacher, by --kd-iters as by a later run without --kd."""
    save = ["--save", str(tmp_path), "--load", str(tmp_path)]
    pool.run(1, train, [*STUDENT, *teacher, *save, "--exit-interval", "3"])
    (alone,) = pool.run(1, train, [*STUDENT, *save])
    (staged,) = pool.run(1, train, [*STUDENT, *teacher, "--kd-iters", "3"])
    assert alone.losses == staged.losses[3:]
    same(alone, staged)
    (taught,) = pool.run(1, train, [*STUDENT, *teacher])
    other = [*teacher[:-1], str(tmp_path)]
    pool.run(1, train, [*STUDENT, *teacher, *save[:1], str(tmp_path / "b"), "--exit-interval", "1"])
    continued = [*STUDENT, *other, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "b")]
    (message,) = pool.run(1, refusals, [continued])
    assert f"the teacher was {teacher[-1]} and is {tmp_path}" in message[0]
    assert taught.losses[:3] == staged.losses[:3] and taught.losses[3] != staged.losses[3]


def test_reset_iteration(pool, teacher, tmp_path):
    """Weights and moments of a checkpoint, and its first sample and learning rate again."""
    first = tmp_path / "first"
    (begun,) = pool.run(1, train, [*STUDENT, "--save", str(first)])
    load = [*STUDENT, "--load", str(first), "--train-iters", "3", "--lr-warmup-iters", "2"]
    reset, tuned = (
        pool.run(1, train, [*load, *teacher, *flags])[0]
        for flags in (["--reset-iteration", "--no-load-lr-state"], ["--finetune"])
    )
    assert len(reset.losses) == 3 and begun.iteration == STEPS
    assert reset.losses[0] == tuned.losses[0] and reset.losses[2] != tuned.losses[2]
    (message,) = pool.run(1, refusals, [[*load, "--reset-iteration", "--save", str(first)]])
    assert "does not continue" in message[0]


def refusals(cases):
    """Why runs with these flags are refused."""
    messages = []
    for argv in cases:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError) as error:
            train(argv)
        messages.append(str(error.value))
    return messages


def test_what_cannot_teach_is_refused_by_name(pool, teacher, tmp_path):
    alone, folder = [*STUDENT, "--kd"], teacher[-1]
    named = [*alone, "--load-teacher", folder]
    bert = str(tmp_path / "bert")
    pool.run(
        1, train, [*FAMILIES["bert"], *"--num-layers 1 --train-iters 1".split(), "--save", bert]
    )
    cases = {
        ("--load-teacher", "missing"): alone,
        ("--load-teacher", folder, "effect with --kd only"): [*STUDENT, "--load-teacher", folder],
        ("no such folder", str(tmp_path / "no")): [*alone, "--load-teacher", f"{tmp_path}/no"],
        ("family bert", "student of gpt"): [*alone, "--load-teacher", bert],
        ("--num-layers-teacher 7", "has 5"): [*named, "--num-layers-teacher", "7"],
        ("--hidden-size-teacher 64", "has 48"): [*named, "--hidden-size-teacher", "64"],
        ("--num-attention-heads-teacher 3", "has 4"): [
            *named, "--num-attention-heads-teacher", "3",
        ],
        ("--num-experts-teacher", "dense"): [*named, "--num-experts-teacher", "4"],
        ("knows 100 tokens", "fewer than the 121"): [*named, "--vocab-size", "120"],
        ("--kd-alpha-ce 0.0", "--kd-beta-ce 0.0"): [
            *named, "--kd-alpha-ce", "0", "--kd-beta-ce", "0",
        ],
        ("--kd-top-k 8", "--kd-cache only"): [*named, "--kd-top-k", "8"],
        ("--no-load-lr-state needs --reset-iteration",): [*named, "--no-load-lr-state"],
    }  # fmt: skip
    (messages,) = pool.run(1, refusals, list(cases.values()))
    for words, message in zip(cases, messages, strict=True):
        for word in words:
            assert word in message or (word == "missing" and "needs" in message), message
    fits = "--num-layers-teacher 5 --hidden-size-teacher 48 --num-attention-heads-teacher 4"
    more = [*fits.split(), "--num-experts-teacher", "1", "1", "--train-iters", "1"]
    (record,) = pool.run(1, train, [*named, *more])
    assert len(record.losses) == 1


def inside(argv):
    """What a teacher is like after the training of its student."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh, contextlib.redirect_stdout(io.StringIO()):
        trainer = build_trainer(run, mesh)
        teacher = trainer.engine.teach.__self__.teacher.engine
        before = {name: param.clone() for param, name in teacher.names.items()}
        optimized = {
            id(param)
            for group in trainer.engine.optimizer.param_groups
            for param in group["params"]
        }
        trainer.fit()
        return {
            "changed": [n for p, n in teacher.names.items() if not p.equal(before[n])],
            "optimized": [n for p, n in teacher.names.items() if id(p) in optimized],
            "gradients": [n for p, n in teacher.names.items() if p.grad is not None],
            "training": teacher.model.training,
            "parameters": len(teacher.names),
            "elements": sum(param.numel() for param in teacher.names),
        }


@pytest.mark.parametrize("flags", sampled(["1", "3"], "1".__eq__))
def test_a_teacher_is_neither_trained_nor_saved(pool, teacher, tmp_path, flags):
    argv = [*STUDENT, *teacher, "--zero-stage", flags, "--save", str(tmp_path)]
    (found,) = pool.run(1, inside, argv)
    assert found.pop("parameters") > 20 and found.pop("elements") > 1e5
    assert not any(found.values()), found
    student = open_checkpoint(tmp_path)
    assert student.model.num_layers == 2
    assert not any(name.startswith("layers.2.") for name in student.names())


def test_zero_3_shares_the_blocks_of_a_teacher(pool, teacher):
    argv = [*STUDENT, *teacher]
    (whole,) = pool.run(1, inside, argv)
    shared = pool.run(2, inside, [*argv, "--zero-stage", "3"])
    embeddings = 2 * 104 * 48 + 48  # with those of the head, and the last norm
    assert all(found["elements"] == embeddings for found in shared)
    assert whole["elements"] > 5 * embeddings


@pytest.mark.proof
@pytest.mark.parametrize("family", ["t5", "bert"])
def test_other_families(pool, tmp_path, family):
    """Their last layer is the same; what else they minimise stays."""
    argv = [*FAMILIES[family], "--train-iters", "3", "--model-family", family]
    argv += ["--decoder-num-layers", "2"] if family == "t5" else []
    wide = ["--hidden-size", "48", "--ffn-hidden-size", "64"]
    pool.run(1, train, [*argv, *wide, "--num-layers", "2", "--save", str(tmp_path)])
    student = [*argv, "--num-layers", "2", *TERMS, "--load-teacher", str(tmp_path)]
    student += DROPOUT["none"]
    reference = train_plainly(student)
    for layout in ("tp2", "pp2"):
        parsed = parse_layout(layout)
        record = pool.run(parsed.processes, train, [*student, *flags_for(parsed)])[0]
        np.testing.assert_allclose(record.losses, reference.losses, rtol=1e-5)
    assert np.isfinite(reference.losses).all() and torch.tensor(reference.losses).std() > 0


def test_a_mixture_of_students(pool, tmp_path):
    """Experts of student and teacher, divided over ranks: as in plain torch on one process."""
    gate = "--mlp-type residual --disable-moe-token-dropping --moe-loss-coeff 0.01".split()
    pyramid = ["--num-layers", "4", "--num-experts", "2", "4", *gate]
    pool.run(1, train, [*TINY, *pyramid, "--train-iters", "2", "--save", str(tmp_path)])
    student = [*STUDENT, *DROPOUT["none"], "--num-layers", "2", "--num-experts", "4", *gate]
    teacher = ["--mos", "--load-teacher", str(tmp_path), "--num-experts-teacher", "2", "4"]
    reference = train_plainly([*student, *teacher])
    layout = parse_layout("ep2-zero1")
    record = pool.run(2, train, [*student, *teacher, *flags_for(layout)])[0]
    np.testing.assert_allclose(record.losses, reference.losses, rtol=1e-5)
    assert np.ptp(reference.losses) > 0.01, "the weights must change"
    more = flags_for(parse_layout("ep4"))
    messages = pool.run(4, refusals, [[*student, *teacher, *more, "--global-batch-size", "8"]])
    assert "a layer of 2 experts, which --expert-model-parallel-size 4" in messages[0][0]
