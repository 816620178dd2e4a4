"""DeepSpeed's folders with a file for each expert, against its layer and engine."""

import re

import pytest
import torch
from stock_moe import EXPERT, EXPERTS, KINDS, load, train_and_save
from training_jobs import TINY, run, train

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.deepspeed_folders.megatron_deepspeed import write_megatron_deepspeed
from megatron.formats.legacy_megatron.names import qkv_to_megatron

THEIRS = {
    "mlp.router.weight": "mlp.deepspeed_moe.gate.wg.weight",
    "mlp.residual.up": "mlp.mlp.dense_h_to_4h",
    "mlp.residual.down": "mlp.mlp.dense_4h_to_h",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "attention.qkv": "self_attention.query_key_value",
    "attention.proj": "self_attention.dense",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "final_norm.norm": "encoder.final_layernorm",
}


def theirs(name, values):
    """Their names and values of a canonical parameter."""
    for ours, other in THEIRS.items():
        name = re.sub(rf"(^|\.){re.escape(ours)}(?=\.|$)", rf"\g<1>{other}", name)
    if ".qkv" in name or "query_key_value" in name:
        values = qkv_to_megatron(values, 3, 2, 2, 4)
    if match := re.fullmatch(r"(layers\.\d+\.mlp)\.experts\.(up|down)\.(weight|bias)", name):
        layer = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}[match[2]]
        for number, each in enumerate(values):
            inner = f"deepspeed_moe.experts{EXPERT}{number}.{layer}.{match[3]}"
            yield f"language_model.encoder.{match[1]}.{inner}", each
        return
    place = "language_model.encoder." if name.startswith("layers.") else "language_model."
    yield place + name, values


def everything(source, kinds=KINDS):
    return {
        f"{name}/{kind}": each
        for ours in source.names()
        for kind in kinds
        for name, each in theirs(ours, source.tensor(ours, kind))
    }


def assert_equal(ranks, read):
    """Weights and moments of all ranks together are those that were read."""
    names = set().union(*ranks)
    assert names == read.keys()
    assert sum(EXPERT in name and "h_to_4h.weight/weight" in name for name in names) == sum(EXPERTS)
    for rank in ranks:
        for name, values in rank.items():
            assert torch.equal(values.float(), read[name]), name


@pytest.mark.parametrize(
    ("size", "ep", "stage", "residual"),
    [
        pytest.param(1, 1, 1, False, id="zero1", marks=pytest.mark.proof),
        pytest.param(2, 2, 1, True, id="zero1-ep2-residual"),
        pytest.param(2, 2, 0, False, id="zero0-ep2", marks=pytest.mark.proof),
        pytest.param(2, 1, 2, False, id="zero2-dp2", marks=pytest.mark.proof),
        pytest.param(4, 2, 2, True, id="zero2-ep2-dp4", marks=pytest.mark.proof),
        pytest.param(4, 4, 1, False, id="zero1-ep4", marks=pytest.mark.proof),
        pytest.param(4, 2, 0, True, id="zero0-ep2-dp4", marks=pytest.mark.proof),
    ],
)
def test_stock_folders_both_ways(pool, tmp_path, size, ep, stage, residual):
    """Every weight and moment that DeepSpeed's engine saved is read, of every expert; what is
    written loads into its engine, over other expert ranks too."""
    ranks = pool.run(size, train_and_save, str(tmp_path / "theirs"), ep, stage, residual)
    source = open_checkpoint(tmp_path / "theirs")
    assert source.model.flags().num_experts == EXPERTS
    assert_equal(ranks, everything(source, KINDS if stage else KINDS[:1]))
    write_megatron_deepspeed(source, tmp_path / "ours")
    other = 3 - ep if size == 2 else ep
    loaded = pool.run(size, load, str(tmp_path / "ours"), other, residual)
    assert_equal(loaded, everything(source, KINDS[:1]))


def test_a_lost_expert_is_named(pool, tmp_path):
    pool.run(1, train_and_save, str(tmp_path), 1, 0, False)
    (tmp_path / "global_step2" / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has no expert 3 of the 4 of layers.1.mlp.experts"):
        open_checkpoint(tmp_path)


PLAIN = [*TINY, "--train-iters", "3", "--hidden-dropout", "0", "--attention-dropout", "0"]
UPCYCLED = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-use-upcycling"]


@pytest.mark.proof
def test_a_run_starts_from_the_upcycled_model(pool, tmp_path):
    """Its first loss is the dense model's, and what it saves before the first step is the start of
    a run without the flag, over expert ranks too."""
    dense, save = str(tmp_path / "dense"), str(tmp_path / "save")
    pool.run(1, train, [*PLAIN, "--save", dense])
    expected = pool.run(1, train, [*PLAIN, "--load", dense, "--finetune"])[0].losses
    argv = [*PLAIN, *UPCYCLED, "--load", dense, "--save", save]
    read = pool.run(1, train, argv)[0].losses
    assert read[0] == pytest.approx(expected[0], rel=1e-6) and read[1:] != expected[1:]
    start = open_checkpoint(tmp_path / "save", "0")
    assert not start.state and start.shape("layers.1.mlp.experts.up.weight") == (4, 128, 32)
    load = ["--load", str(start.folder), "--expert-model-parallel-size", "2"]
    divided = pool.run(2, train, [*PLAIN, *UPCYCLED[:-1], *load])[0].losses
    # Later ones follow from the router's gradients, which are 0 where experts are equal.
    assert divided[0] == pytest.approx(read[0], rel=1e-6)
    output, error = pool.run(1, run, argv)[0]
    assert error is not None and f"--save {save} contains global_step3" in error


@pytest.mark.proof
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save", "x"], "--moe-use-upcycling needs --load"),
        (["--load", "x"], "--moe-use-upcycling needs --save"),
    ],
)
def test_upcycling_needs_both_folders(pool, flags, message):
    error = pool.run(1, run, [*PLAIN, *UPCYCLED, *flags])[0][1]
    assert error is not None and message in error
