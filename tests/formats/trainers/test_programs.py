"""Models of other trainers against these themselves, where MEGATRON_TEST_LITGPT,
MEGATRON_TEST_NANOTRON, MEGATRON_TEST_OLMO_CORE and MEGATRON_TEST_TORCHTITAN name folders that have
them (``pip install --no-deps --target FOLDER`` of ``litgpt==0.5.13 lightning lightning-utilities
torchmetrics``, of ``nanotron==0.4 dacite``, of ``ai2-olmo-core==3.0.0 dataclass-extensions
bettermap rich markdown-it-py mdurl``, and of ``torchtitan==0.3.0 torchdata tyro docstring-parser
typeguard shtab spmd_types triton``)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_forward import forward

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.inspection import model_of

CASES = {
    "litgpt": ("model of litgpt", ["llama", "llama31", "qwen2", "mistral", "pythia"]),
    "nanotron": ("checkpoint of nanotron", ["llama"]),
    "olmo-core": ("checkpoint of OLMo-core", ["default", "reordered_norm"]),
    "torchtitan": ("sharded checkpoint (DCP)", ["llama3", "qwen3"]),
}
PROGRAM = Path(__file__).parent / "programs.py"
NANOTRON = Path(__file__).parent / "nanotron_program.py"


@pytest.mark.proof
@pytest.mark.parametrize("program, name", [(p, name) for p in CASES for name in CASES[p][1]])
def test_logits_are_those_of_the_program(program, name, tmp_path):
    variable = f"MEGATRON_TEST_{program.upper().replace('-', '_')}"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no folder")
    words = [str(PROGRAM), program, str(tmp_path), name]
    if program == "nanotron":
        words = [str(NANOTRON), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.environ[variable], "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    source = open_checkpoint(tmp_path)
    assert source.title == CASES[program][0]
    model = model_of(source, torch.float32, torch.device("cpu"))
    tokens, positions = torch.arange(24).view(2, 12) % 64, torch.arange(12).repeat(2, 1)
    with torch.no_grad():
        ours = forward(model, tokens, positions, model=source.model)
    theirs = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(ours[..., :64], theirs, rtol=1.3e-6, atol=1e-5)
    if (tmp_path / "after").is_dir():
        require_next_step(tmp_path)


def require_next_step(folder):
    """Compares torch's AdamW, from the moments that are read, with the program's own."""
    source, after = open_checkpoint(folder), open_checkpoint(folder / "after")
    gradients = open_checkpoint(folder / "gradients")
    assert (source.state["iteration"], source.state["optimizer_step"]) == (3, 3)
    for name in source.names():
        weight = torch.nn.Parameter(source.tensor(name))
        optimizer = torch.optim.AdamW([weight], 1e-2, (0.9, 0.95), weight_decay=0.1, foreach=False)
        moments = {kind: source.tensor(name, kind) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(3.0), **moments}
        weight.grad = gradients.tensor(name)
        optimizer.step()
        assert torch.equal(weight.detach(), after.tensor(name)), name
