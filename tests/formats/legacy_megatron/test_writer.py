"""Export to Megatron's layout: round trips, and what Megatron refuses."""

import argparse
import os

import pytest
import torch
from rank_files import assert_same_tree, rank_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.config import TokenizerConfig
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron

SIZES = [(t, p) for t in (1, 2, 4) for p in (1, 2)]


def opened(save):
    return MegatronCheckpoint(MegatronCheckpoint.locate(save, None))


@pytest.fixture
def ours(tmp_path, legacy_model, random_weights, write_legacy):
    """Makes a checkpoint of our own format, from files that the tests' writer has written."""

    def make(dtype=torch.float32, adam=None, **changes):
        model = legacy_model(**changes)
        weights = random_weights(model, dtype=dtype)
        write_legacy(tmp_path / "first", weights, model, adam=adam)
        return CheckpointReader(write_checkpoint(tmp_path / "ours", opened(tmp_path / "first")))

    return make


def assert_equal(source, other, dtype=None):
    assert list(source.names()) == list(other.names())
    for name in source.names():
        expected = source.tensor(name)
        if dtype is not None:
            expected = expected.to(dtype).float()
        assert torch.equal(other.tensor(name), expected), name


@pytest.mark.parametrize(
    ("llama", "tensor", "pipeline"),
    [
        pytest.param(llama, *sizes, marks=() if sizes in [(1, 1), (2, 2)] else pytest.mark.proof)
        for llama in (False, True)
        for sizes in SIZES
        if not (llama and sizes[0] == 4)
    ],
)
def test_round_trip_is_bitwise(llama, tensor, pipeline, ours, tmp_path):
    source = ours(llama=llama)
    folder = write_megatron(source, tmp_path / "legacy", tensor, pipeline, 100)
    assert folder == tmp_path / "legacy" / "iter_0000100"
    assert len(list(folder.glob("mp_rank_*/model_optim_rng.pt"))) == tensor * pipeline
    between = opened(tmp_path / "legacy")
    assert (between.tensor_size, between.pipeline_size) == (tensor, pipeline)
    assert_equal(source, between)
    back = CheckpointReader(write_checkpoint(tmp_path / "back", between))
    assert_equal(source, back)
    assert back.model == source.model


@pytest.mark.parametrize(
    ("llama", "tensor", "pipeline"), [(False, 1, 4), (False, 4, 2), (True, 2, 1), (True, 1, 2)]
)
def test_against_the_writer_of_the_tests(
    llama, tensor, pipeline, ours, tmp_path, legacy_model, random_weights, write_legacy
):
    """The same dictionaries, tensors and folders as files that were written without the export."""
    source = ours(llama=llama)
    weights = {name: source.tensor(name) for name in source.names()}
    rows = 16 * tensor * -(-61 // (16 * tensor))
    model = legacy_model(llama=llama, padded_vocab_size=rows)
    expected = write_legacy(tmp_path / "wanted", weights, model, 3, tensor, pipeline)
    actual = write_megatron(source, tmp_path / "found", tensor, pipeline, 100)
    paths = sorted(path.relative_to(expected) for path in expected.rglob("*.pt"))
    assert sorted(path.relative_to(actual) for path in actual.rglob("*.pt")) == paths
    for path in paths:
        here, there = (rank_file(root / path) for root in (expected, actual))
        assert here["checkpoint_version"] == there["checkpoint_version"]
        assert here["iteration"] == there["iteration"]
        assert_same_tree(here["model"], there["model"])
        assert type(there["args"]) is argparse.Namespace
        for name, value in vars(here["args"]).items():
            if name in ("params_dtype", "onnx_safe", "num_experts", "consumed_train_samples"):
                continue
            if name == "num_query_groups" and not llama:
                continue  # has no effect there
            assert getattr(there["args"], name) == value, name
    trackers = {
        (root / "latest_checkpointed_iteration.txt").read_text()
        for root in (tmp_path / "wanted", tmp_path / "found")
    }
    assert trackers == {"100"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, ours, tmp_path):
    source = ours()
    write_megatron(source, tmp_path / "legacy", 2, 1, None, dtype)
    actual = opened(tmp_path / "legacy")
    assert actual.folder.name == "release" and actual.dtype("final_norm.norm.bias") == dtype
    assert_equal(source, actual, getattr(torch, dtype))


def test_reshaping_keeps_what_adam_made(ours, adam_run, tmp_path):
    """Float32 copies of half-precision weights become ours, with the moments."""
    source = ours(dtype=torch.float16, adam=adam_run(torch.float16))
    assert source.state["optimizer_step"] == 2
    assert set(source.kinds("final_norm.norm.bias")) == {"weight", "exp_avg", "exp_avg_sq"}
    write_megatron(source, tmp_path / "legacy", 2, 2, 100)
    assert_equal(source, opened(tmp_path / "legacy"))


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"llama": True}, (4, 1), "--target-tensor-parallel-size 4 must divide num_query_groups 2"),
        ({}, (3, 1), "--target-tensor-parallel-size 3 must divide num_attention_heads 4"),
        ({}, (0, 1), "--target-tensor-parallel-size 0"),
        ({}, (1, 3), "--target-pipeline-parallel-size 3 must divide the 4 layers"),
    ],
)
def test_sizes_that_megatron_refuses(changes, sizes, message, ours, tmp_path):
    source = ours(**changes)
    with pytest.raises(ValueError, match=message):
        write_megatron(source, tmp_path / "legacy", *sizes)
    assert not (tmp_path / "legacy").exists()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"position_embedding_type": "alibi"}, "--position-embedding-type"),
        ({"sliding_window": 8}, "--sliding-window"),
        ({"post_norm": True}, "--post-norm"),
        ({"parallel_residual": True}, "--parallel-residual"),
        ({"attn_logit_softcapping": 30.0}, "--attn-logit-softcapping"),
        ({"relu": True}, r"--squared-relu \(not relu\)"),
        ({"add_bias_linear": False, "add_attention_bias": True}, "--add-attention-bias"),
    ],
)
def test_networks_that_megatron_does_not_have(changes, flag, ours, tmp_path, legacy_model):
    source = ours()
    source.model = legacy_model(**changes)
    with pytest.raises(ValueError, match=f"a checkpoint of Megatron requires .*{flag}"):
        write_megatron(source, tmp_path / "legacy")


def test_nothing_is_left_of_a_failed_export(ours, tmp_path, monkeypatch):
    source = ours()
    save = tmp_path / "legacy"
    write_megatron(source, save, iteration=1)
    count = 0

    def full(handle):
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_megatron(source, save, 2, 1, 2)
    monkeypatch.undo()
    assert sorted(path.name for path in save.iterdir()) == [
        "iter_0000001", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "1"
    with pytest.raises(CheckpointError, match="iter_0000001 exists already"):
        write_megatron(source, save, iteration=1)


def test_an_unknown_tokenizer_stays_unknown(ours, tmp_path):
    """Megatron has no type for ids whose tokenizer nobody named."""
    source = ours()
    source.tokenizer = TokenizerConfig(tokenizer_type="IdTokenizer", vocab_size=60)
    write_megatron(source, tmp_path / "legacy", 1, 1, 1)
    assert opened(tmp_path / "legacy").tokenizer is None
