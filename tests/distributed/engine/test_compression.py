"""Runs with compression: weights after each step, schedules, checkpoints, cleaned models."""

import contextlib
import json

import pytest
import torch
from pool import RankError
from training_jobs import TINY, run, train

from megatron.apps.parity.runs import watched_trainer
from megatron.checkpoint.reader import CheckpointReader
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.features.compression.layers import layers_in
from megatron.features.compression.quantisers import bits_after, quantise
from megatron.formats.conversion.commands import LoadConfig, opened, to_hf
from megatron.run.run import parse_run

SMALL = [*TINY, "--num-layers", "2", "--global-batch-size", "4"]
FP16 = ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "1024"]
STAGES = {
    "zero1-fp16": FP16,
    "zero0": ["--zero-stage", "0"],
    "zero0-fp16": ["--zero-stage", "0", *FP16[2:]],
    "zero1-bf16": ["--zero-stage", "1", "--bf16"],
    "zero2-bf16": ["--zero-stage", "2", "--bf16", "--accumulate-allreduce-grads-in-fp32"],
    "zero3-bf16": ["--zero-stage", "3", "--bf16"],
}


def technique(kind, params, modules=("encoder.layers",), offset=1, related=None, **shared):
    group = {"params": params, "modules": list(modules)}
    if related:
        group["related_modules"] = related
    return {
        kind: {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, **shared},
            "different_groups": {"g": group},
        }
    }


BITS = {"start_bits": 5, "target_bits": 3, "quantization_period": 2}
MOQ = technique("weight_quantization", BITS, quantize_groups=8)
STATIC = technique("activation_quantization", {"bits": 8}, range_calibration="static")
ROWS = technique(
    "row_pruning", {"dense_ratio": 0.5}, ("mlp.dense_h_to_4h",), related=[["mlp.dense_4h_to_h"]]
)
SPARSE = technique("sparse_pruning", {"dense_ratio": 0.6}, ("self_attention",))
LEARNED = technique("sparse_pruning", {"dense_ratio": 0.6}, method="topk") | technique(
    "head_pruning", {"dense_ratio": 0.5}, ("self_attention.dense",), num_heads=4
)
FORWARD = technique("weight_quantization", BITS, quantize_groups=8, quantize_weight_in_forward=True)
SECTIONS = {
    "moq": MOQ | STATIC | SPARSE | ROWS,
    "forward": FORWARD | LEARNED | technique("activation_quantization", {"bits": 4}),
    "mixed": technique(
        "weight_quantization", BITS, quantize_groups=8, rounding="stochastic",
        fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.2},
    ),
}  # fmt: skip


def flags(section) -> list[str]:
    return ["--compression-training", json.dumps(section)]


def same(runs, others):
    for record, other in zip(runs, others, strict=True):
        assert record.losses == other.losses and record.state.keys() == other.state.keys()
        for name, values in record.state.items():
            assert (values == other.state[name]).all(), name


def test_off_and_before_its_offset_a_run_is_a_plain_one(pool):
    """Bit by bit."""
    argv = [*SMALL, *FP16, "--train-iters", "2"]
    off = technique("weight_quantization", BITS, enabled=False)
    late = {**MOQ, **technique("weight_quantization", BITS, offset=9), **ROWS}
    late |= technique("row_pruning", {"dense_ratio": 0.5}, ("mlp",), offset=9)
    late |= technique("activation_quantization", {"bits": 8}, offset=9, range_calibration="static")
    plain = pool.run(1, train, argv)
    for section in (off, late):
        same(plain, pool.run(1, train, [*argv, *flags(section)]))


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_learned_scores_are_updated_as_scalars(pool, optimizer):
    """Of scores the order matters, and no rule of matrices is for them: after one step they are
    what AdamW makes of them, bit by bit, and matrices are not."""
    argv = [*SMALL, "--zero-stage", "1", "--train-iters", "1", *flags(SECTIONS["forward"])]
    argv += ["--clip-grad", "0"]
    plain, other = (pool.run(1, train, [*argv, *more])[0].state for more in (
        ["--optimizer", "adam"], ["--optimizer", optimizer]))  # fmt: skip
    scores = [name for name in plain if "_scores" in str(name)]
    assert len(scores) > 4
    assert all((plain[name] == other[name]).all() for name in scores)
    matrix = next(name for name in plain if "mlp.up.weight" in str(name))
    assert (plain[matrix] != other[matrix]).any()


def watched(argv):
    """After each step, of the working weights of each compressed layer: the most different values
    of a group, and whether they are those of the main weights. For the pool."""
    lines = []
    run_ = parse_run(None, argv)
    with distributed(run_.config.parallel) as mesh:
        trainer = watched_trainer(run_, mesh, lambda result: None)
        engine, train_step = trainer.engine, trainer.engine.train_step

        def step(*args, **options):
            lines.append(_values(engine, len(lines)))
            return train_step(*args, **options)

        engine.train_step = step
        trainer.fit()
        lines.append(_values(engine, len(lines)))
    return lines


def _values(engine, updates):
    for _ in range(2):  # the second time as after a step that was skipped
        engine.kernels.invalidate()
        engine.kernels.refresh()
    main = {own.name: own.get("weight")[: own.slice.numel].clone() for own in owned_slices(engine)}
    seen = []
    with contextlib.ExitStack() as stack:
        for layer in layers_in(engine.model):
            weight = layer.module.weight
            if engine.stage == 3:
                import deepspeed

                stack.enter_context(deepspeed.zero.GatheredParameters([weight]))
            groups = weight.detach().reshape(8, -1)
            most = max(len(group.unique()) for group in groups)
            exact = main[f"{layer.name}.weight"].view(weight.shape).to(weight.dtype)
            if updates > 1:
                bits = bits_after(updates - 1, 5, 3, 2)
                exact = quantise(exact, bits, 8)
            seen.append((most, bool(torch.equal(exact, weight.detach()))))
    return max(most for most, _ in seen), all(equal for _, equal in seen)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "zero1-fp16" else pytest.mark.proof) for n in STAGES]
)
def test_weights_after_each_step(pool, name):
    """In every group at most 2^b values, which are those of the main weights: 5 bits in the two
    updates after the offset, then 4, and from the fourth on 3."""
    argv = [*SMALL, *STAGES[name], "--train-iters", "6", *flags(MOQ)]
    (lines,) = pool.run(1, watched, argv)
    assert all(equal for _, equal in lines), lines
    most = [count for count, _ in lines]
    assert min(most[:2]) > 32, "the first two steps compute with plain weights"
    bits = [bits_after(n, 5, 3, 2) for n in range(1, 6)]
    assert bits == [5, 4, 4, 3, 3]
    assert all(count <= 2**b for count, b in zip(most[2:], bits, strict=True)), most


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(k, n, marks=() if (k, n) == ("moq", "zero1-fp16") else pytest.mark.proof)
        for k in SECTIONS
        for n in STAGES
    ],
)
def test_resume_is_bitwise(pool, tmp_path, kind, name):
    argv = [*SMALL, *STAGES[name], *flags(SECTIONS[kind]), "--train-iters", "6"]
    saved = ["--save", str(tmp_path), "--save-interval", "3"]
    whole = pool.run(1, train, [*argv, *saved])
    rest = pool.run(1, train, [*argv, "--load", str(tmp_path), "--load-tag", "global_step3"])
    assert rest[0].losses == whole[0].losses[3:]
    for key, values in rest[0].state.items():
        assert (values == whole[0].state[key]).all(), key


@pytest.mark.proof
@pytest.mark.parametrize("kind", SECTIONS)
def test_another_layout_continues(pool, tmp_path, kind):
    """Ranges, masks and the clock of schedules are those of the run, whatever its layout."""
    argv = [*SMALL, "--zero-stage", "1", *flags(SECTIONS[kind]), "--train-iters", "6"]
    argv += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    tensor = ["--tensor-model-parallel-size", "2"]
    pool.run(2, train, [*argv, *tensor, "--save", str(tmp_path), "--save-interval", "3"])
    load = ["--load", str(tmp_path), "--load-tag", "global_step3"]
    again = pool.run(2, train, [*argv, *tensor, *load])
    alone = pool.run(1, train, [*argv, *load])
    assert alone[0].losses[0] == pytest.approx(again[0].losses[0], abs=2e-6)
    assert alone[0].losses == pytest.approx(again[0].losses, abs=1e-3)


def cleaned(folder, output, *more) -> CheckpointReader:
    from megatron.features.compression.clean import clean

    clean(["--load", str(folder), "--output", str(output), *more])
    return opened(LoadConfig(str(output)))


def test_cleaned_model(pool, tmp_path, capsys):
    """It computes what the run computes in its evaluation, with 3 bits in each group and half of
    the rows of the MLP."""
    section = MOQ | ROWS
    argv = [*SMALL, "--train-iters", "5", "--eval-iters", "2", "--eval-interval", "5"]
    argv += ["--split", "50,50,0"]
    save = ["--save", str(tmp_path / "run")]
    printed, error = pool.run(1, run, [*argv, *FP16, *flags(section), *save])[0]
    assert error is None
    masked = cleaned(tmp_path / "run", tmp_path / "masked", "--keep-shapes")
    weight = masked.tensor("layers.1.attention.qkv.weight")
    assert max(len(group.unique()) for group in weight.reshape(8, -1)) <= 8
    up, down = masked.tensor("layers.0.mlp.up.weight"), masked.tensor("layers.0.mlp.down.weight")
    smaller = cleaned(tmp_path / "run", tmp_path / "small")
    assert smaller.model.mlp.ffn_hidden_size == 64
    rows = up.abs().sum(1).nonzero().view(-1)
    assert torch.equal(smaller.tensor("layers.0.mlp.up.weight"), up[rows])
    assert torch.equal(smaller.tensor("layers.0.mlp.down.weight"), down[:, rows])
    expected = _validation(printed)
    load = ["--load", str(tmp_path / "small"), "--finetune", "--skip-train"]
    printed, error = pool.run(1, run, [*argv, *FP16, "--ffn-hidden-size", "64", *load])[0]
    assert error is None and _validation(printed) == pytest.approx(expected, abs=2e-4)


@pytest.mark.proof
def test_a_bert_is_compressed_resumed_and_exported(pool, tmp_path, capsys):
    """Weights, activations, rows and heads at once, stopped after 5 of 10 steps; transformers
    computes the cleaned model's logits."""
    section = MOQ | ROWS | technique("activation_quantization", {"bits": 8})
    section |= technique(
        "head_pruning", {"dense_ratio": 0.5}, ("attention.dense",), num_heads=4,
        related=[["attention.query_key_value"]],
    )  # fmt: skip
    argv = ["--model-family", "bert", *SMALL, "--zero-stage", "1", "--bf16", "--train-iters", "10"]
    argv += [*flags(section), "--save", str(tmp_path / "run"), "--save-interval", "5"]
    (whole,) = pool.run(1, train, argv)
    (rest,) = pool.run(1, train, [*argv, "--load", str(tmp_path / "run"), "--load-tag",
                                  "global_step5"])  # fmt: skip
    assert len(whole.losses) == 10 and rest.losses == whole.losses[5:]
    assert all((rest.state[name] == values).all() for name, values in whole.state.items())
    cleaned(tmp_path / "run", tmp_path / "clean")
    to_hf(["--load", str(tmp_path / "clean"), "--output", str(tmp_path / "hf")])
    printed = capsys.readouterr().out
    assert "row_pruning: ffn_hidden_size is 64" in printed and "tokens agree" in printed


def _validation(printed: str) -> float:
    line = next(line for line in printed.splitlines() if "validation" in line and "loss" in line)
    return float(line.rpartition("lm loss")[2].split()[1 if "value" in line else 0].strip(":|"))


def test_a_student_begins_with_layers_of_its_teacher(pool, tmp_path):
    teacher = [*SMALL, "--num-layers", "4", "--train-iters", "1"]
    pool.run(1, train, [*teacher, "--save", str(tmp_path)])
    section = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "encoder.layers",
            "teacher_layer": [1, 3],
            "other_module_name": ["embedding", "encoder.final_layernorm"],
        }
    }
    argv = [*SMALL, "--train-iters", "1", "--lr", "1e-12", "--min-lr", "0", *flags(section)]
    (student,) = pool.run(1, train, [*argv, "--pretrained-checkpoint", str(tmp_path)])
    source = opened(LoadConfig(str(tmp_path)))
    for number, taken in ((0, 1), (1, 3)):
        for name in ("attention.qkv.weight", "mlp.down.bias"):
            ours = torch.from_numpy(student.state[f"layers.{number}.{name}/weight/0"])
            theirs = source.tensor(f"layers.{taken}.{name}").flatten()
            assert torch.allclose(ours, theirs, atol=1e-6)
    ours = torch.from_numpy(student.state["embedding.word_embeddings.weight/weight/0"])
    theirs = source.tensor("embedding.word_embeddings.weight").flatten()
    assert torch.allclose(ours[: len(theirs)], theirs, atol=1e-6)
    with pytest.raises(RankError, match="there is no teacher: name its checkpoint"):
        pool.run(1, train, argv)


REFUSED = [
    (technique("weight_quantization", BITS, ("decoder.blocks",)), [], "has 'decoder.blocks' in"),
    (technique("weight_quantization", BITS, quantize_groups=7), [], "quantize_groups 7 does not"),
    (technique("head_pruning", {"dense_ratio": 0.5}, num_heads=2), [], "num_heads is 2, and the"),
    (MOQ, ["--use-precision-aware-optimizer", "--zero-stage", "1"], "needs main weights of its"),
    (MOQ, ["--optimizer", "schedule_free", "--lr-decay-style", "constant"], "both set the weights"),
    (MOQ, ["--fp8-format", "hybrid"], "--fp8-format hybrid contradicts compression_training"),
]


@pytest.mark.parametrize(("section", "more", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_runs_that_cannot_compress(section, more, message):
    from megatron.config import ConfigError
    from megatron.families import trained_spec

    with pytest.raises(ConfigError) as error:
        trained_spec(parse_run(None, [*SMALL, "--train-iters", "1", *more, *flags(section)]).config)
    assert message in str(error.value)


def test_a_module_in_two_groups():
    from megatron.config import ConfigError
    from megatron.families import trained_spec

    section = technique("weight_quantization", BITS)
    groups = section["weight_quantization"]["different_groups"]
    groups["h"] = {"params": BITS, "modules": ["mlp"]}
    with pytest.raises(
        ConfigError, match=r"groups.g.modules and .*groups.h.modules both have layer"
    ):
        trained_spec(parse_run(None, [*SMALL, "--train-iters", "1", *flags(section)]).config)
