"""Megatron-Core's torch_dist against Megatron-Core itself, where MEGATRON_TEST_CORE names a folder
that has it (``pip install --no-deps --target FOLDER megatron-core==0.16.1``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_forward import forward

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.inspection import model_of
from megatron.formats.legacy_megatron.experts import of_one_expert
from megatron.formats.legacy_megatron.names import qkv_from_megatron, rename
from megatron.formats.sharded.writer import write_torch_dist

CORE = os.environ.get("MEGATRON_TEST_CORE")
PROGRAM = Path(__file__).parent / "core_program.py"
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not CORE, reason="MEGATRON_TEST_CORE names no Megatron-Core"),
]
HEADS, GROUPS, WIDTH, TOKENS = 4, 2, 8, 62
NEW = {"non_homogeneous_layers": True, "singleton_local_shards": True}
CASES = {
    "llama": {},
    "llama-numbered-halves": {"metadata": NEW},
    "llama-bf16-distributed": {"bf16": True, "distributed": True},
    "llama-bf16-distributed-numbered": {"bf16": True, "distributed": True, "metadata": NEW},
    "gpt-bf16": {"gelu": True, "bf16": True},
    "gpt": {"gelu": True},
    "experts": {"experts": 4},
    "experts-numbered-halves": {"experts": 4, "metadata": NEW},
}


def run_core(command, folder, settings):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), command, str(folder), json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": str(CORE), "OMP_NUM_THREADS": "1"},
        cwd=folder.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (folder.parent / "store").unlink(missing_ok=True)


def expected_of(path):
    return torch.load(path, weights_only=False)


def canonical(name, values):
    """Our name and order of a parameter of the model, and the number of its expert."""
    fused = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm",
        "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
    }
    for module, norm in fused.items():
        name = name.replace(f"{module}.", f"{norm}_")
    ours, expert = of_one_expert(rename(name))
    if ".attention.qkv." in ours:
        values = qkv_from_megatron(values, 3.0, HEADS, GROUPS, WIDTH)
    if ours.startswith(("embedding.word", "output_layer")):
        values = values[:TOKENS]
    return ours, values, expert


def compare(source, expected):
    """The float32 weights and the moments of a checkpoint against those in the program's memory."""
    for name, tensors in expected.items():
        for kind, values in tensors.items():
            ours, whole, expert = canonical(name, values)
            read = source.tensor(ours, kind)
            assert torch.equal(read[expert] if ".experts." in ours else read, whole), (ours, kind)
    assert {canonical(name, t["weight"])[0] for name, t in expected.items()} == {*source.names()}


@pytest.mark.parametrize("name", CASES)
def test_reads_what_megatron_core_wrote(name, tmp_path):
    settings = CASES[name]
    folder = tmp_path / "iter_0000005"
    run_core("save", folder, settings)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    expected = expected_of(tmp_path / "expected.pt")
    source = open_checkpoint(tmp_path)
    assert source.title == "distributed checkpoint of Megatron-Core"
    assert source.state == {
        "iteration": 5, "consumed_samples": 40, "optimizer_step": 1, "loss_scaler": {},
    }  # fmt: skip
    compare(source, expected["trained"])
    if expected["logits"] is not None:
        model = model_of(source, torch.float32, torch.device("cpu"))
        tokens = torch.arange(16).view(2, 8) % TOKENS
        with torch.no_grad():
            ours = forward(model, tokens, torch.arange(8).repeat(2, 1))
        torch.testing.assert_close(
            ours[..., :TOKENS], expected["logits"][..., :TOKENS], rtol=1.3e-6, atol=1e-5
        )


@pytest.mark.parametrize("name", ["llama", "llama-bf16-distributed", "gpt-bf16"])
def test_megatron_core_loads_what_is_written(name, tmp_path):
    settings = CASES[name]
    run_core("save", tmp_path / "iter_0000005", settings)
    source = open_checkpoint(tmp_path / "iter_0000005")
    dtype = "bfloat16" if settings.get("bf16") else "float32"
    written = write_torch_dist(
        source, tmp_path / "written", dtype, distributed=settings.get("distributed", False)
    )
    run_core("load", written, settings)
    expected = expected_of(tmp_path / "expected.pt")
    loaded = expected_of(tmp_path / "written" / "loaded.pt")
    assert loaded["common"] == {"iteration": 5, "checkpoint_version": 3.0}
    for each, tensors in expected["trained"].items():
        rows = TOKENS if "word_embeddings" in each or "output_layer" in each else None
        assert torch.equal(loaded["weights"][each][:rows], expected["weights"][each][:rows]), each
        for kind, values in tensors.items():
            assert torch.equal(loaded["trained"][each][kind][:rows], values[:rows]), (each, kind)


def test_a_damaged_copy_is_refused_by_name(tmp_path):
    run_core("save", tmp_path / "iter_0000005", {})
    file = tmp_path / "iter_0000005" / "__0_1.distcp"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=r"__0_1.distcp has .* the file is incomplete"):
        open_checkpoint(tmp_path)
