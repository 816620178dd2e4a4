"""Turns an exported checkpoint into a MegatronBertForPreTraining by transformers' own converter,
unchanged, and computes the logits of both heads; golden.json next to it is what it wrote. It is run
as megatron_gpt2/make.py is, on a model with --layernorm-epsilon 1e-12 and --no-bias-gelu-fusion,
which the converter assumes.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_gpt2"))
from make import digests


def main() -> None:
    checkpoint, result = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv = ["convert_megatron_bert_checkpoint.py", str(checkpoint)]
    runpy.run_module(
        "transformers.models.megatron_bert.convert_megatron_bert_checkpoint", run_name="__main__"
    )
    model = transformers.MegatronBertForPreTraining.from_pretrained(checkpoint.parent).eval()
    places = torch.arange(12)
    tokens = torch.stack([(7 * row + 5 * places) % 61 for row in range(2)])
    types = torch.stack([places >= 5 + row for row in range(2)]).long()
    mask = torch.stack([places < 12 - 3 * row for row in range(2)]).long()
    with torch.no_grad():
        output = model(tokens, attention_mask=mask, token_type_ids=types)
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tensors": digests(checkpoint),
        "tokens": tokens.tolist(),
        "types": types.tolist(),
        "mask": mask.tolist(),
        "logits": rounded(output.prediction_logits[..., :61].tolist()),
        "order": rounded(output.seq_relationship_logits.tolist()),
    }
    result.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def rounded(values):
    return [rounded(each) for each in values] if isinstance(values, list) else round(values, 7)


if __name__ == "__main__":
    main()
