"""Logits of Meta's own program, and the tensors and configuration of transformers' own script, for
the files of meta_files.py; golden.json next to it is what it wrote.

    python3 -m venv old
    old/bin/pip install torch accelerate transformers==4.46.3 llama-models==0.3.0 fairscale==0.4.13
    old/bin/python tests/golden/meta_llama/make.py tests/golden/meta_llama/golden.json

Meta's program scales the frequencies of every Llama 3.1 and later by 8, transformers' script those
of Llama 3.2 by 32, so the latter has no logits of Meta's program.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from meta_files import PARAMS, RANKS, VERSIONS, VOCABULARY, shares, tokens, write


def logits(rank: int, case: str, result: str, port: int) -> None:
    """Runs Meta's program on one of a case's ranks; the first writes the logits."""
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    # Its token embedding is cut by rows, which is Llama 3's form.
    ranks = RANKS[case] if VERSIONS[case] >= "3" else 1
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    initialize_model_parallel(ranks)
    params = {"rope_theta": 10000.0} | PARAMS[case] | {"vocab_size": VOCABULARY}
    model = Transformer(ModelArgs(**params, max_batch_size=2, max_seq_len=32)).float()
    state = {name: values.float() for name, values in shares(case, ranks)[rank].items()}
    del state["rope.freqs"]
    model.load_state_dict(state, strict=True)
    found = model(tokens(), 0)
    if rank == 0:
        rows = [[round(value, 7) for value in row] for row in found[1].tolist()]
        Path(result).write_text(json.dumps(rows))
    dist.destroy_process_group()


def converted(case: str, folder: Path) -> dict:
    """config.json and the digests of the tensors that transformers' script makes."""
    from safetensors import safe_open
    from transformers.models.llama.convert_llama_weights_to_hf import write_model

    write_model(
        str(folder / "hf"), str(write(case, folder / "meta")), llama_version=VERSIONS[case],
        vocab_size=VOCABULARY, num_shards=RANKS[case],
    )  # fmt: skip
    with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
        digests = {
            name: hashlib.sha256(file.get_tensor(name).float().numpy().tobytes()).hexdigest()
            for name in sorted(file.keys())
        }
    return {"config": json.loads((folder / "hf" / "config.json").read_text()), "tensors": digests}


def main() -> None:
    import transformers

    golden = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": {}}
    for number, case in enumerate(PARAMS):
        with tempfile.TemporaryDirectory() as folder:
            found = converted(case, Path(folder))
            if case != "llama3.2":
                result = Path(folder, "logits.json")
                ranks = RANKS[case] if VERSIONS[case] >= "3" else 1
                torch.multiprocessing.spawn(
                    logits, (case, str(result), 29610 + number), nprocs=ranks
                )
                found["logits"] = json.loads(result.read_text())
            golden["cases"][case] = found
    Path(sys.argv[1]).write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
