"""Turns an exported checkpoint into a GPT-2 by transformers' own converter, unchanged, and computes
logits; golden.json next to it is what it wrote (transformers 4.46.3, torch 2.13.0).

    python3 -m venv old && old/bin/pip install torch transformers==4.46.3
    MEGATRON_OLD_TRANSFORMERS=old/bin/python python -m pytest \\
        tests/formats/legacy_megatron/test_against_transformers.py

runs it on a fresh export (later versions of transformers lack the converter): make.py CHECKPOINT
RESULT, where CHECKPOINT is a model_optim_rng.pt, or a zip archive with
release/mp_rank_00/model_optim_rng.pt in it. The converter calls torch.load as it was before torch
2.6; with a later torch it needs TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1.
"""

import hashlib
import json
import runpy
import sys
import zipfile
from pathlib import Path

import torch
import transformers

MEMBER = "release/mp_rank_00/model_optim_rng.pt"


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor of the export, by the keys on the way to it."""
    if checkpoint.suffix == ".zip":
        with zipfile.ZipFile(checkpoint) as archive, archive.open(MEMBER) as member:
            content = torch.load(member)
    else:
        content = torch.load(checkpoint)
    found = {}

    def walk(value, place):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        else:
            found[place] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()

    walk(content["model"], "model")
    return dict(sorted(found.items()))


def main() -> None:
    checkpoint, result = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv = ["convert_megatron_gpt2_checkpoint.py", str(checkpoint)]
    runpy.run_module(
        "transformers.models.megatron_gpt2.convert_megatron_gpt2_checkpoint", run_name="__main__"
    )
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint.parent).eval()
    tokens = [[(7 * row + 5 * place) % 61 for place in range(12)] for row in range(2)]
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits[..., :61]
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tensors": digests(checkpoint),
        "tokens": tokens,
        "logits": [[[round(x, 7) for x in at] for at in row] for row in logits.tolist()],
    }
    result.write_text(json.dumps(golden, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
