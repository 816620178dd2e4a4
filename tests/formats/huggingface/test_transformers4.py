"""transformers 4 and what is written here, both ways, in a process of its own.

pip install --no-deps --target tf4 transformers==4.57.1 huggingface_hub==0.36.0 tokenizers==0.22.1
MEGATRON_TEST_TRANSFORMERS4=tf4 pytest tests/formats/huggingface/test_transformers4.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_cases import CASES
from hf_expert_cases import EXPERT_CASES
from hf_inputs import pair

from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of

FOLDER = os.environ.get("MEGATRON_TEST_TRANSFORMERS4")

# Logits of every model in a folder, and the models as transformers 4 saves them.
SCRIPT = """
import sys
from pathlib import Path
import torch
import transformers

assert transformers.__version__.startswith("4.")
root = Path(sys.argv[1])
for folder in sorted((root / "written").iterdir()):
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    model, report = getattr(transformers, name).from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], folder
    with torch.no_grad():
        output = model.eval()(**torch.load(folder / "inputs.pt"))
        keys = torch.load(folder / "keys.pt")
        torch.save({key: output[key] for key in keys}, folder / "outputs.pt")
    model.save_pretrained(root / "saved" / folder.name)
"""


@pytest.mark.skipif(not FOLDER, reason="MEGATRON_TEST_TRANSFORMERS4 names no transformers 4")
def test_transformers_4_reads_and_writes_the_same(hf_model, tmp_path):
    inputs = {}
    for model_type, cases in (CASES | EXPERT_CASES).items():
        for case, settings in cases.items():
            hf_model(model_type, **settings).save_pretrained(tmp_path / "theirs")
            written = tmp_path / "written" / f"{model_type}-{case}"
            written.mkdir(parents=True)
            source = HuggingFaceFolder(tmp_path / "theirs")
            write_model(source, written, "float32", 10**9, architecture=model_type)
            inputs[written] = pair(source.model, 40)
            torch.save(inputs[written].theirs, written / "inputs.pt")
            begin = inputs[written].ours.changed(targets=None)
            state = model_of(source, torch.float32, torch.device("cpu"))(begin)
            keys = list(source.architecture.task_of(source.model).outputs(state, source.model))
            torch.save(keys, written / "keys.pt")
    environment = os.environ | {"PYTHONPATH": str(Path(FOLDER).resolve())}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for written, made in inputs.items():
        begin, counted = made.ours, made.counted
        expected = torch.load(written / "outputs.pt")
        for folder in (written, tmp_path / "saved" / written.name):
            source = HuggingFaceFolder(folder)
            ours = model_of(source, torch.float32, torch.device("cpu"))
            state = ours(begin.changed(targets=None))
            for name, actual in (
                source.architecture.task_of(source.model).outputs(state, source.model).items()
            ):
                wanted = expected[name]
                if counted is not None and actual.ndim > 2:
                    actual, wanted = actual[counted], wanted[counted]
                torch.testing.assert_close(
                    actual, wanted, rtol=1.3e-6, atol=3e-5,
                    msg=lambda m, n=folder: f"{n}: {m}",
                )  # fmt: skip
