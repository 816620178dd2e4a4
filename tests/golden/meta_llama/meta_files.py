"""Small Llamas in the files of Meta's program, cut over ranks as its layers are.

The tests and make.py, which runs other people's programs on them, write the same files.
"""

import json
from pathlib import Path

import numpy as np
import torch

_SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5}
PARAMS = {
    "llama": _SMALL | {"norm_eps": 1e-6, "multiple_of": 16, "vocab_size": -1},
    "llama2-grouped": _SMALL
    | {"n_kv_heads": 2, "multiple_of": 8, "ffn_dim_multiplier": 1.3, "vocab_size": -1},
    "llama3": _SMALL
    | {"n_kv_heads": 2, "multiple_of": 16, "ffn_dim_multiplier": 1.3, "vocab_size": 40,
       "rope_theta": 500000.0},
    "llama3.1": _SMALL
    | {"n_kv_heads": 2, "multiple_of": 16, "vocab_size": 40, "rope_theta": 500000.0,
       "use_scaled_rope": True},
    "llama3.2": _SMALL
    | {"n_kv_heads": 1, "multiple_of": 16, "vocab_size": 40, "rope_theta": 500000.0,
       "use_scaled_rope": True},
}  # fmt: skip
RANKS = {"llama": 2, "llama2-grouped": 2, "llama3": 2, "llama3.1": 1, "llama3.2": 1}
"""Model-parallel ranks, each with a file."""
VERSIONS = {
    "llama": "2", "llama2-grouped": "2", "llama3": "3", "llama3.1": "3.1", "llama3.2": "3.2",
}  # fmt: skip
"""What transformers' script is told; later ones cut the token embedding by rows."""
VOCABULARY = 40
ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3",
        "output")  # fmt: skip
COLUMNS = ("attention.wo", "feed_forward.w2")


def weights(case: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Whole tensors by Meta's names."""
    params = PARAMS[case]
    hidden, heads = params["dim"], params["n_heads"]
    keys = params.get("n_kv_heads", heads) * hidden // heads
    inner = int(params.get("ffn_dim_multiplier", 1) * int(8 * hidden / 3))
    inner = -(-inner // params["multiple_of"]) * params["multiple_of"]
    shapes = {"tok_embeddings": (VOCABULARY, hidden), "norm": (hidden,)}
    shapes["output"] = (VOCABULARY, hidden)
    for n in range(params["n_layers"]):
        block = {
            "attention.wq": (hidden, hidden), "attention.wk": (keys, hidden),
            "attention.wv": (keys, hidden), "attention.wo": (hidden, hidden),
            "feed_forward.w1": (inner, hidden), "feed_forward.w2": (hidden, inner),
            "feed_forward.w3": (inner, hidden), "attention_norm": (hidden,),
            "ffn_norm": (hidden,),
        }  # fmt: skip
        shapes |= {f"layers.{n}.{name}": shape for name, shape in block.items()}
    draws = np.random.RandomState(list(PARAMS).index(case))
    found = {}
    for name, shape in shapes.items():
        values = torch.tensor(draws.standard_normal(shape), dtype=torch.float32) * 0.2
        values = values + 1 if name.endswith("norm") else values
        found[f"{name}.weight"] = values.to(dtype)
    if case == "llama3.2":
        found["output.weight"] = found["tok_embeddings.weight"].clone()
    return found


def shares(case: str, ranks: int | None = None) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank."""
    ranks = RANKS[case] if ranks is None else ranks
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for name, values in weights(case).items():
        stem, parts = name.removesuffix(".weight"), [values] * ranks
        if stem == "tok_embeddings":
            parts = values.chunk(ranks, 0 if VERSIONS[case] >= "3" else 1)
        elif stem.endswith(ROWS):
            parts = values.chunk(ranks, 0)
        elif stem.endswith(COLUMNS):
            parts = values.chunk(ranks, 1)
        for rank, part in enumerate(parts):
            found[rank][name] = part.clone()
    for each in found:
        each["rope.freqs"] = torch.ones(4)
    return found


def write(case: str, folder: Path, ranks: int | None = None) -> Path:
    """Writes params.json and the files of the ranks."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(PARAMS[case]))
    for rank, tensors in enumerate(shares(case, ranks)):
        torch.save(tensors, folder / f"consolidated.{rank:02d}.pth")
    return folder


def tokens() -> torch.Tensor:
    """A batch [2, 24]."""
    return torch.tensor([[(7 * row + 5 * place) % 37 for place in range(24)] for row in range(2)])
