"""Writes the golden indexed files next to it with megatron-core (made with 0.16.1 and torch 2.13).

pip install torch megatron-core==0.16.1 packaging numpy     # an environment of its own
python tests/golden/indexed/make.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def documents(dtype: str, seed: int) -> list[list[np.ndarray]]:
    """Documents of one to three sequences, the last one without any."""
    rng = np.random.RandomState(seed)
    kind = np.dtype(dtype)
    high = 1000 if kind.kind == "f" else min(np.iinfo(kind).max, 100_000)
    return [
        [rng.randint(0, high, rng.randint(1, 9)).astype(kind) for _ in range(rng.randint(1, 4))]
        for _ in range(5)
    ] + [[]]


def main() -> None:
    expected = {}
    for seed, dtype in enumerate(DTYPES):
        for multimodal in (False, True) if dtype == "int32" else (False,):
            name = f"{dtype}_modes" if multimodal else dtype
            builder = IndexedDatasetBuilder(
                str(HERE / f"{name}.bin"), dtype=np.dtype(dtype).type, multimodal=multimodal
            )
            made = documents(dtype, seed)
            for number, sequences in enumerate(made):
                tokens = np.concatenate(sequences) if sequences else np.empty(0, dtype)
                # torch knows no arithmetic on uint16; it only carries the values here.
                builder.add_document(
                    torch.from_numpy(tokens.astype("float64")),
                    [len(s) for s in sequences],
                    [number % 2] * len(sequences) if multimodal else None,
                )
            builder.finalize(str(HERE / f"{name}.idx"))
            expected[name] = [[s.tolist() for s in sequences] for sequences in made]
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in expected.items())
    (HERE / "expected.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
