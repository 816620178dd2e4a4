"""An export becomes a GPT-2 or a BERT with our logits by transformers' own converters for Megatron.

They run where MEGATRON_OLD_TRANSFORMERS names the python of an environment that has them (see
tests/golden/megatron_gpt2/make.py); everywhere the exports are compared with the tensors that they
were run on, and our logits with those that came out.
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

from megatron.families import spec_of
from megatron.features.masked.batch import BertSample, collate_bert
from megatron.formats.inspection import model_of
from megatron.formats.legacy_megatron.writer import write_megatron

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron_gpt2"
GOLDEN_BERT = GOLDEN.parent / "megatron_bert"
OLD_PYTHON = os.environ.get("MEGATRON_OLD_TRANSFORMERS")


def assert_logits(source, golden):
    model = model_of(source, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        logits = forward(model, torch.tensor(golden["tokens"]))[..., :61]
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, torch.tensor(golden["logits"]), rtol=1.3e-6, atol=1e-5)


def assert_both_heads(source, golden):
    """At all positions that are not padding."""
    model = model_of(source, torch.float32, torch.device("cpu"))
    tokens, types, mask = (torch.tensor(golden[name]) for name in ("tokens", "types", "mask"))
    rows = (tokens, types, tokens, tokens[:, 0], mask.float(), mask)
    batch = collate_bert(
        [BertSample(*map(torch.Tensor.numpy, row)) for row in zip(*rows, strict=True)]
    )
    with torch.no_grad():
        state = model(spec_of(source.model).begin(batch).changed(targets=None))
    logits, expected = state.hidden[..., :61], torch.tensor(golden["logits"])
    assert logits.std() > 0.3
    for actual, wanted in (
        (logits[mask > 0], expected[mask > 0]),
        (state.pooled, torch.tensor(golden["order"])),
    ):
        torch.testing.assert_close(actual, wanted, rtol=1.3e-6, atol=1e-5)


def digests(path):
    actual = {}

    def walk(value, place):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        else:
            actual[place] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()

    walk(torch.load(path, weights_only=False)["model"], "model")
    return actual


CASES = {"ours": (GOLDEN, assert_logits), "our_bert": (GOLDEN_BERT, assert_both_heads)}


@pytest.mark.parametrize("name", CASES)
def test_against_golden_of_transformers(name, request, tmp_path):
    source, (place, assert_same) = request.getfixturevalue(name), CASES[name]
    golden = json.loads((place / "golden.json").read_text())
    folder = write_megatron(source, tmp_path / "export")
    assert digests(folder / "mp_rank_00" / "model_optim_rng.pt") == golden["tensors"]
    assert_same(source, golden)


@pytest.mark.skipif(OLD_PYTHON is None, reason="MEGATRON_OLD_TRANSFORMERS names no python")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("archive", [False, True])
def test_against_the_converter_of_transformers(archive, name, request, tmp_path):
    source, (place, assert_same) = request.getfixturevalue(name), CASES[name]
    folder = write_megatron(source, tmp_path / "export")
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    if archive:
        with zipfile.ZipFile(tmp_path / "megatron.zip", "w") as packed:
            packed.write(path, "release/mp_rank_00/model_optim_rng.pt")
        path = tmp_path / "megatron.zip"
    result = tmp_path / "golden.json"
    done = subprocess.run(
        [OLD_PYTHON, str(place / "make.py"), str(path), str(result)],
        env=os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    actual = json.loads(result.read_text())
    assert_same(source, actual)
    golden = json.loads((place / "golden.json").read_text())
    assert actual["tensors"] == golden["tensors"] and actual["tokens"] == golden["tokens"]
