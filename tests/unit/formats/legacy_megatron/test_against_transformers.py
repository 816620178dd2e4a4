"""An export becomes a GPT-2 with our logits by transformers' own converter for Megatron.

The converter runs where MEGATRON_OLD_TRANSFORMERS names the python of an environment that has it
(see tests/golden/megatron_gpt2/make.py); everywhere the export is compared with the tensors that it
was run on, and our logits with those that came out.
"""

import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from gpt_forward import forward

from megatron.formats.legacy_megatron.writer import write_megatron
from megatron.inference.load import model_of

GOLDEN = Path(__file__).parents[3] / "golden" / "megatron_gpt2"
OLD_PYTHON = os.environ.get("MEGATRON_OLD_TRANSFORMERS")


def assert_logits(source, golden):
    model = model_of(source, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        logits = forward(model, torch.tensor(golden["tokens"]))[..., :61]
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, torch.tensor(golden["logits"]), rtol=1.3e-6, atol=1e-5)


def digests(path):
    found = {}

    def walk(value, place):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        else:
            found[place] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()

    walk(torch.load(path, weights_only=False)["model"], "model")
    return found


def test_against_golden_of_transformers(ours, tmp_path):
    golden = json.loads((GOLDEN / "golden.json").read_text())
    folder = write_megatron(ours, tmp_path / "export")
    assert digests(folder / "mp_rank_00" / "model_optim_rng.pt") == golden["tensors"]
    assert_logits(ours, golden)


@pytest.mark.skipif(OLD_PYTHON is None, reason="MEGATRON_OLD_TRANSFORMERS names no python")
@pytest.mark.parametrize("archive", [False, True])
def test_against_the_converter_of_transformers(archive, ours, tmp_path):
    folder = write_megatron(ours, tmp_path / "export")
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    if archive:
        with zipfile.ZipFile(tmp_path / "megatron.zip", "w") as packed:
            packed.write(path, "release/mp_rank_00/model_optim_rng.pt")
        path = tmp_path / "megatron.zip"
    result = tmp_path / "golden.json"
    done = subprocess.run(
        [OLD_PYTHON, str(GOLDEN / "make.py"), str(path), str(result)],
        env=os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert_logits(ours, found)
    golden = json.loads((GOLDEN / "golden.json").read_text())
    assert found["tensors"] == golden["tensors"] and found["tokens"] == golden["tokens"]
