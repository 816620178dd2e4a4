"""Stopping and resuming changes nothing, bit for bit; at another layout, nothing but rounding."""

import contextlib
import io
import json
import random
import shutil

import numpy as np
import pytest
import torch
from family_models import ENCODER_DROPOUT, FAMILIES, MODELS, blocks
from safetensors.torch import load_file
from samples import sampled
from training_jobs import TINY, train

from megatron.apps.parity.runs import watched_trainer
from megatron.engine.environment import distributed
from megatron.engine.state import create_moments, owned_slices
from megatron.run.run import parse_run

STEPS = 8
ENDLESS = [*TINY, "--lr-decay-style", "cosine", "--eval-interval", "3", "--eval-iters", "1"]
FLAGS = [*ENDLESS, "--train-iters", str(STEPS), "--lr-warmup-iters", "2"]
FP16 = ["--fp16", "--initial-loss-scale", str(2.0**21), "--loss-scale-window", "2"]
DELAYED = [
    *("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    *("--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"),
]
BERT = [*FAMILIES["bert"], *"--num-layers 2 --eval-iters 1 --zero-stage 1".split()]
T5 = [*FAMILIES["t5"], *MODELS["t5"]["relative"], *"--num-layers 2 --decoder-num-layers 2".split()]
T5 += ["--eval-iters", "1", "--zero-stage", "1"]
RETRO = [*FAMILIES["retro"], *blocks("retro", 4), *ENCODER_DROPOUT.format(0.1).split()]
RETRO += ["--eval-iters", "1", "--zero-stage", "1"]
BIENCODER = [*FAMILIES["biencoder"], *"--num-layers 2 --eval-iters 1 --zero-stage 1".split()]
EXPERTS = [
    *"--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1".split(),
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
]
CONTEXT = ["--context-parallel-size", "2"]
GATE = "--num-experts 4 --topk 1 --expert-interval 1 --expert-model-parallel-size 2".split()
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope"
).split()
MAMBA = [
    *"--num-layers 6 --hybrid-layer-pattern M-*MM- --mamba-num-groups 1".split(),
    *"--mamba-state-dim 8 --mamba-head-dim 8 --reset-attention-mask".split(),
]
DELTA = (
    "--num-layers 4 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--attention-output-gate --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 6 --reset-attention-mask"
).split()
MUON = "--optimizer muon --muon-nesterov --lr 2e-3".split()
CASES = {
    "zero0": (1, ["--zero-stage", "0"]),
    "zero0-dp2": (2, ["--zero-stage", "0"]),
    "zero0-bf16": (1, ["--zero-stage", "0", "--bf16"]),
    "zero0-dp2-fp16": (2, ["--zero-stage", "0", *FP16, "--hysteresis", "1"]),
    "zero1-dp2": (2, ["--zero-stage", "1"]),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", *FP16, "--hysteresis", "1"]),
    "zero2-dp2-bf16": (2, ["--zero-stage", "2", "--bf16"]),
    "zero3-dp2": (2, ["--zero-stage", "3"]),
    "zero3-dp2-bf16": (2, ["--zero-stage", "3", "--bf16"]),
    "zero3-dp2-fp16": (2, ["--zero-stage", "3", *FP16]),
    "zero1-dp4": (4, ["--zero-stage", "1"]),
    "zero1-tp2": (2, ["--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "zero1-dp2-bf16-sums-fp32": (
        2,
        ["--zero-stage", "1", "--bf16", "--accumulate-allreduce-grads-in-fp32"],
    ),
    "zero3-tp2-sp-shared-kv": (
        4,
        [
            "--tensor-model-parallel-size",
            "2",
            "--sequence-parallel",
            "--num-query-groups",
            "1",
            "--zero-stage",
            "3",
        ],
    ),
    "zero0-pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "zero0-pp2-fp16-sums-fp32": (
        2,
        [
            *("--zero-stage", "0", *FP16, "--pipeline-model-parallel-size", "2"),
            "--accumulate-allreduce-grads-in-fp32",
        ],
    ),
    "zero1-pp2-dp2-fp16": (
        4,
        ["--zero-stage", "1", *FP16, "--pipeline-model-parallel-size", "2"],
    ),
    "zero1-pp2-interleaved-bf16": (
        2,
        [
            "--zero-stage",
            "1",
            "--bf16",
            "--pipeline-model-parallel-size",
            "2",
            "--num-layers",
            "4",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
        ],
    ),
    "sgd": (2, ["--zero-stage", "1", "--optimizer", "sgd"]),
    "rampup": (2, ["--rampup-batch-size", "2", "2", "8", "--zero-stage", "1"]),
    "fp8-delayed": (2, ["--zero-stage", "1", *DELAYED]),
    "fp8-delayed-pp2": (2, [*DELAYED, "--pipeline-model-parallel-size", "2"]),
    "fp8-zero3": (2, ["--zero-stage", "3", "--bf16", "--fp8-format", "e4m3"]),
    "bert-zero1-tp2-sp": (
        2,
        [*BERT, *"--tensor-model-parallel-size 2 --sequence-parallel".split()],
    ),
    "bert-zero3-dp2-bf16": (2, [*BERT, "--zero-stage", "3", "--bf16"]),
    "bert-zero1-pp2-fp16": (2, [*BERT, *FP16, "--pipeline-model-parallel-size", "2"]),
    "biencoder-zero3-dp2-bf16": (2, [*BIENCODER, "--zero-stage", "3", "--bf16"]),
    "biencoder-zero1-pp2": (2, [*BIENCODER, "--pipeline-model-parallel-size", "2"]),
    "t5-zero0-pp2-fp16": (
        2,
        [*T5, *FP16, "--zero-stage", "0", "--pipeline-model-parallel-size", "2"],
    ),
    "bert-zero0-dp2-fp16": (2, [*BERT, *FP16, "--zero-stage", "0"]),
    "t5-zero0-pp2": (2, [*T5, "--zero-stage", "0", "--pipeline-model-parallel-size", "2"]),
    "t5-zero1-pp2-dp2-split": (
        4,
        [
            *T5,
            *("--pipeline-model-parallel-size", "2"),
            *("--pipeline-model-parallel-split-rank", "1"),
        ],
    ),
    "t5-zero2-dp2-bf16": (2, [*T5, "--zero-stage", "2", "--bf16"]),
    "retro-zero1-tp2-sp": (
        2,
        [*RETRO, *"--tensor-model-parallel-size 2 --sequence-parallel".split()],
    ),
    "retro-zero1-pp2-interleaved": (
        2,
        [
            *RETRO,
            *("--pipeline-model-parallel-size", "2"),
            *("--num-layers-per-virtual-pipeline-stage", "1"),
        ],
    ),
    "retro-zero1-pp2-dp2-bf16": (4, [*RETRO, "--bf16", "--pipeline-model-parallel-size", "2"]),
    "retro-zero2-dp2-bf16": (2, [*RETRO, "--zero-stage", "2", "--bf16"]),
    "retro-zero3-dp2-fp16": (2, [*RETRO, *FP16, "--zero-stage", "3"]),
    "experts-zero1-ep2": (2, EXPERTS),
    "experts-zero3-ep2-bf16": (2, [*EXPERTS, "--zero-stage", "3", "--bf16"]),
    "experts-zero2-ep2-dp4-fp16": (4, [*EXPERTS, "--zero-stage", "2", *FP16]),
    "experts-gate-zero1-ep2-pp2": (4, [*GATE, "--pipeline-model-parallel-size", "2"]),
    "experts-zero1-ep2-tp2-sp": (
        4,
        [*EXPERTS, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "experts-recomputed-ep2": (2, [*EXPERTS, "--recompute-granularity", "full"]),
    "mamba-zero1-tp2-sp": (
        2,
        [*MAMBA, *"--zero-stage 1 --tensor-model-parallel-size 2 --sequence-parallel".split()],
    ),
    "mamba-zero3-cp2-bf16": (2, [*MAMBA, *CONTEXT, "--zero-stage", "3", "--bf16"]),
    "cp2-zero3-bf16": (2, [*CONTEXT, "--zero-stage", "3", "--bf16"]),
    "cp2-a2a-dp2-zero2-fp16": (4, [*CONTEXT, "--cp-comm-type", "a2a", "--zero-stage", "2", *FP16]),
    "cp2-tp2-sp-zero1": (
        4,
        [
            *(*CONTEXT, "--zero-stage", "1"),
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ],
    ),
    "cp2-pp2-zero0-fp16": (
        4,
        [*CONTEXT, *FP16, "--zero-stage", "0", "--pipeline-model-parallel-size", "2"],
    ),
    "latent-zero3-tp2-sp": (
        4,
        [*LATENT, "--zero-stage", "3", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "latent-zero1-pp2": (2, [*LATENT, "--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
    "delta-zero1-tp2": (2, [*DELTA, "--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "delta-zero3-cp2": (2, [*DELTA, *CONTEXT, "--zero-stage", "3"]),
    "muon-zero1-dp2": (2, [*MUON, "--zero-stage", "1"]),
    "muon-zero3-dp2-bf16": (2, [*MUON, "--zero-stage", "3", "--bf16"]),
    "muon-mamba-zero2-tp2": (
        2,
        [*MUON, *MAMBA, "--zero-stage", "2", "--tensor-model-parallel-size", "2"],
    ),
    "zero2-pp2-dp2-bf16-sums-fp32": (
        4,
        [
            *("--zero-stage", "2", "--bf16", "--pipeline-model-parallel-size", "2"),
            "--accumulate-allreduce-grads-in-fp32",
        ],
    ),
}
SAMPLE = {"zero1-dp2-fp16", "zero2-dp2-bf16", "zero3-dp2", "t5-zero0-pp2", "experts-zero1-ep2"}
"""Cases of every test run; `make proof` runs all, each with several stops."""
RANDOM = random.Random(20)


def cases():
    for name in CASES:
        for number in range(3):
            stop = RANDOM.randrange(1, STEPS)
            in_sample = name in SAMPLE and number == 0
            marks = () if in_sample else (pytest.mark.proof,)
            yield pytest.param(name, stop, marks=marks, id=f"{name}-stop{stop}-{number}")


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory):
    """The same run without a stop, made once per case."""
    made = {}

    def make(name):
        if name not in made:
            size, flags = CASES[name]
            save = tmp_path_factory.mktemp(name)
            made[name] = (pool.run(size, train, [*FLAGS, *flags, "--save", str(save)]), save)
        return made[name]

    return make


def evaluations(save):
    """Iteration, and losses by name, of each evaluation."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["iteration"], {name: value for name, value in row.items() if "loss" in name})
        for row in rows
        if row["kind"] in ("validation", "test")
    ]


@pytest.mark.parametrize(("name", "stop"), list(cases()))
def test_resume_is_bitwise(pool, unbroken, tmp_path, name, stop):
    size, flags = CASES[name]
    whole, save = unbroken(name)
    argv = [*FLAGS, *flags, "--save", str(tmp_path)]
    first = pool.run(size, train, [*argv, "--exit-interval", str(stop)])
    second = pool.run(size, train, [*argv, "--load", str(tmp_path)])
    assert first[0].iteration == stop
    assert second[0].iteration == STEPS
    for rank in range(size):
        for what in ("losses", "norms", "scales", "skipped"):
            joined = getattr(first[rank], what) + getattr(second[rank], what)
            assert joined == getattr(whole[rank], what), what
        assert second[rank].state.keys() == whole[rank].state.keys()
        for key, values in whole[rank].state.items():
            assert np.array_equal(second[rank].state[key], values), key
    if "fp16" in name:
        assert any(whole[0].skipped), "the case is there to skip steps"
    assert evaluations(tmp_path) == evaluations(save)


@pytest.mark.proof
def test_shared_key_value_heads_continue_whole_ones(pool, tmp_path):
    """One key-value head on two ranks: two parameters there are one here."""
    heads = ["--num-query-groups", "1"]
    shared = (2, ["--zero-stage", "2", "--tensor-model-parallel-size", "2", *heads])
    whole = (1, ["--zero-stage", "1", *heads])
    check_continues(pool, tmp_path / "a", shared, whole)
    check_continues(pool, tmp_path / "b", whole, shared)


def check_continues(pool, save, source, target):
    flags = [*FLAGS, "--attention-dropout", "0", "--hidden-dropout", "0", "--save", str(save)]
    size, layout = source
    first = pool.run(size, train, [*flags, *layout, "--exit-interval", "4"])[0]
    same = pool.run(size, train, [*flags, *layout, "--load", str(save)])[0]
    size, layout = target
    other = pool.run(size, train, [*flags, *layout, "--load", str(save), "--load-tag", "4"])[0]
    np.testing.assert_allclose(other.losses, same.losses, rtol=5e-6)
    np.testing.assert_allclose(other.norms, same.norms, rtol=5e-5)
    assert len(first.losses) == len(other.losses) == 4


STAGE_1 = [*FLAGS, "--zero-stage", "1"]


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A folder of a finished run of two processes, with saves after steps 4 and 8, and its
    record. Tests that write into the folder copy it."""
    folder = tmp_path_factory.mktemp("trained")
    records = pool.run(2, train, [*STAGE_1, "--save", str(folder), "--save-interval", "4"])
    return folder, records[0]


def copied(folder, target):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def test_finetune_and_no_load_optim(pool, trained, tmp_path):
    folder, scratch = trained
    load = [*STAGE_1, "--load", str(folder)]
    argv = [*load, "--save", str(tmp_path), "--finetune"]
    finetuned = pool.run(1, train, argv)[0]
    assert len(finetuned.losses) == STEPS
    assert finetuned.losses[0] < scratch.losses[0]
    fresh = [*load, "--no-load-optim", "--train-iters", "9"]
    assert len(pool.run(1, train, fresh)[0].losses) == 1


def random_numbers(argv):
    """The state of torch's generator after a run; for the pool."""
    train(argv)
    return torch.get_rng_state()


def test_each_rank_continues_its_random_numbers(pool, trained):
    """A run that has nothing left to do has those of the end."""
    states = pool.run(2, random_numbers, [*STAGE_1, "--load", str(trained[0])])
    for rank, state in enumerate(states):
        saved = load_file(trained[0] / "global_step8" / f"random-{rank:05d}.safetensors")
        assert torch.equal(state, saved["cpu"])
    assert not torch.equal(*states)


def moments_before_the_first_update(argv):
    """The largest number in moments after a run, and when it has gone back to where it had not
    updated anything; for the pool."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, lambda result: None)
        trainer.fit()
        largest = []
        for _ in range(2):
            slices = owned_slices(trainer.engine)
            moments = [own.get(kind) for own in slices for kind in own.moments]
            largest.append(max(float(values.abs().max()) for values in moments))
            create_moments(trainer.engine, 0)
    return largest


def test_a_run_that_goes_back_has_no_moments_of_later(pool):
    after, before = pool.run(1, moments_before_the_first_update, [*STAGE_1, "--train-iters", "3"])[
        0
    ]
    assert after > 0 == before


def test_another_run_is_not_overwritten(pool, trained, tmp_path):
    """Forgetting --load, or fine-tuning into the same folder, must not start over in it."""
    for name in ("a", "b"):
        copied(trained[0], tmp_path / name)
    flags = [*FLAGS, "--save", str(tmp_path / "a")]
    for more in (
        [],
        ["--load", str(tmp_path / "a"), "--finetune"],
        ["--load", str(tmp_path / "b")],
    ):
        message = pool.run(1, refused, [*flags, *more])[0]
        assert "contains global_step8, which this run does not continue" in message
        assert f"--load {tmp_path / 'a'}" in message
    assert (tmp_path / "a" / "latest").read_text() == "global_step8"


def test_changed_values_are_said(pool, trained):
    load = [*FLAGS, "--load", str(trained[0]), "--load-tag", "4"]
    argv = [*load, "--seed", "5", "--norm-epsilon", "1e-6"]
    output = pool.run(1, printed, argv)[0]
    assert "differs from the checkpoint's run: seed: 1234 -> 5" in output
    assert "differs from the checkpoint's run: norm_epsilon: 1e-05 -> 1e-06" in output
    assert "hidden_size" not in output


def printed(argv):
    """What a run prints; for the pool."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(argv)
    return output.getvalue()


def test_another_optimizer_is_refused(pool, trained):
    argv = [*STAGE_1, "--load", str(trained[0]), "--load-tag", "4", "--optimizer", "sgd"]
    message = pool.run(1, refused, argv)[0]
    assert "by --optimizer adam, and this run has --optimizer sgd" in message
    assert "--no-load-optim" in message
    assert len(pool.run(1, train, [*argv, "--no-load-optim"])[0].losses) == STEPS - 4


def test_another_dtype_starts_its_own_loss_scale(pool, tmp_path):
    flags = [*FLAGS, "--zero-stage", "1"]
    pool.run(1, train, [*flags, "--bf16", "--save", str(tmp_path), "--exit-interval", "2"])
    argv = [*flags, "--fp16", "--initial-loss-scale", "4096", "--load", str(tmp_path)]
    assert set(pool.run(1, train, argv)[0].scales) == {4096.0}


ZERO = {
    "round-robin": {"stage": 1, "round_robin_gradients": True},
    "alignment": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
    "sub-groups": {"stage": 3, "sub_group_size": 3000},
    "hpz": {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
"""Options of the JSON with which DeepSpeed keeps weights or optimizer state elsewhere."""


@pytest.mark.parametrize("options", sampled(ZERO, lambda name: name == "sub-groups"))
def test_zero_options(pool, tmp_path, options):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": ZERO[options]}))
    flags = [*FLAGS, "--deepspeed_config", str(tmp_path / "ds.json")]
    whole = pool.run(2, train, [*flags, "--save", str(tmp_path), "--save-interval", "4"])[0]
    load = ["--load", str(tmp_path), "--load-tag", "4"]
    assert pool.run(2, train, [*flags, *load])[0].losses == whole.losses[4:]
    plain = [*FLAGS, "--zero-stage", "0", *load]
    other = pool.run(2, train, plain)[0].losses
    np.testing.assert_allclose(other, whole.losses[4:], rtol=5e-6)


def test_evaluation_alone(pool, trained, tmp_path):
    """A run that was finished and evaluated before is not evaluated again."""
    folder = copied(trained[0], tmp_path)
    files = ["--save", str(folder), "--load", str(folder)]
    pool.run(1, train, [*ENDLESS, *files, "--skip-train", "--global-batch-size", "2"])
    pool.run(1, train, [*FLAGS, *files, "--train-iters", "4"])
    assert [iteration for iteration, _ in evaluations(tmp_path)] == [3, 6, *[8] * 4]


def test_batch_sizes_that_do_not_continue(pool, trained):
    load = ["--load", str(trained[0]), "--load-tag", "4", "--global-batch-size"]
    message = pool.run(1, refused, [*STAGE_1, *load, "2"])[0]
    assert "step 4 after 16 samples" in message and "--global-batch-size 2" in message
    for length in ("--train-samples 32", "--train-iters 8 --train-tokens 999"):
        argv = [*ENDLESS, *length.split(), *load, "8"]
        assert "comes after 32" in pool.run(1, refused, argv)[0]
    assert len(pool.run(1, train, [*STAGE_1, *load, "8"])[0].losses) == STEPS - 4


def test_finetune_needs_a_checkpoint(pool, tmp_path):
    message = pool.run(1, refused, [*FLAGS, "--finetune", "--load", str(tmp_path / "typo")])[0]
    assert "--finetune" in message and "typo" in message


def refused(argv):
    """The message with which a run is refused; for the pool."""
    with pytest.raises(ValueError) as caught:
        train(argv)
    return str(caught.value)


def test_another_architecture_is_refused(pool, trained):
    argv = [*STAGE_1, "--load", str(trained[0]), "--hidden-size", "64", "--swiglu"]
    message = pool.run(1, refused, argv)[0]
    assert "hidden_size is 32 in the checkpoint and 64 in this run" in message
    assert 'activation is "gelu_tanh" in the checkpoint and "swiglu" in this run' in message


def test_damage_is_refused_on_all_ranks(pool, trained, tmp_path):
    copied(trained[0], tmp_path)
    path = tmp_path / "global_step8" / "optimizer-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(bytes(content))
    messages = pool.run(2, refused, [*STAGE_1, "--load", str(tmp_path)])
    assert any("optimizer-00001.safetensors is damaged" in message for message in messages)
