"""Writes golden.json next to it with megatron-core (0.16.1): the three indices and tokens.

    pip install torch megatron-core==0.16.1 packaging numpy     # an environment of its own
    python tests/golden/gpt_sample_order/make.py

Its sample order is that of Megatron in mid 2023 for samples with one extra token. Tokens of the
corpus count up from 0, so that a sample shows where it was read.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

CASES = [
    # name, document lengths (count, most), documents, seq length, samples, seed
    ("part of one epoch", (40, 30), (0, 40), 16, 20, 1234),
    ("exactly one epoch", (30, 30), (0, 30), 16, None, 1234),
    ("one sample more than an epoch", (30, 30), (0, 30), 16, "epoch+1", 1),
    ("last epoch nearly whole, shuffled with the others", (20, 20), (0, 20), 8, "1.9 epochs", 2),
    ("last epoch just below 80 percent, separate", (20, 20), (0, 20), 8, "1.78 epochs", 3),
    ("five epochs, last separate", (15, 12), (0, 15), 7, "4.3 epochs", 4),
    ("five epochs, all together", (15, 12), (0, 15), 7, "4.95 epochs", 5),
    ("validation: documents in the middle", (60, 25), (37, 52), 10, 12, 1234),
    ("validation: many epochs of few documents", (60, 25), (50, 53), 10, 60, 1234),
    ("samples longer than an epoch", (6, 5), (1, 5), 64, 5, 6),
    ("one document", (1, 50), (0, 1), 4, 30, 7),
    ("sequence length 1", (8, 6), (0, 8), 1, 40, 8),
    ("long documents", (5, 400), (0, 5), 32, 45, 0),
    ("large seed", (25, 20), (0, 25), 12, 30, 2**32 - 1),
]
BLENDS = [
    ([1.0], 10),
    ([0.5, 0.5], 20),
    ([0.7, 0.3], 50),
    ([0.1, 0.2, 0.7], 100),
    ([1 / 3, 1 / 3, 1 / 3], 60),
    ([0.001, 0.999], 60),
    ([0.3, 0.25, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01], 300),
]


def sample_order(folder: str, case: tuple) -> dict:
    name, (count, most), documents, seq_length, samples, seed = case
    lengths = np.random.RandomState(count + most).randint(1, most + 1, count)
    prefix = f"{folder}/{abs(hash(name))}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        builder.add_document(torch.arange(start, end), [int(end - start)])
    builder.finalize(f"{prefix}.idx")
    per_epoch = (int(lengths[slice(*documents)].sum()) - 1) // seq_length
    if samples is None:
        samples = per_epoch
    elif samples == "epoch+1":
        samples = per_epoch + 1
    elif isinstance(samples, str):
        samples = int(float(samples.split()[0]) * per_epoch)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=f"{folder}/cache",
        tokenizer=SimpleNamespace(unique_identifiers={}, vocab_size=1 << 20, eod=0, pad=0),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    dataset = GPTDataset(
        IndexedDataset(prefix),
        prefix,
        np.arange(*documents, dtype=np.int32),
        samples,
        Split.train,
        config,
    )
    tokens = [dataset._query_document_sample_shuffle_indices(i)[0] for i in range(len(dataset))]
    return {
        "name": name,
        "lengths": lengths.tolist(),
        "documents": list(documents),
        "seq_length": seq_length,
        "num_samples": samples,
        "seed": seed,
        "document_index": dataset.document_index.tolist(),
        "sample_index": dataset.sample_index.tolist(),
        "shuffle_index": dataset.shuffle_index.tolist(),
        "first_tokens": [int(t[0]) for t in tokens],
        "token_sums": [int(t.sum()) for t in tokens],
    }


def blend(weights: list[float], size: int) -> dict:
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    shares = np.array(weights, np.float64)
    shares /= shares.sum()
    helpers.build_blending_indices(dataset, sample, shares, len(shares), size, False)
    return {"weights": weights, "dataset": dataset.tolist(), "sample": sample.tolist()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        orders = [sample_order(folder, case) for case in CASES]
    here = Path(__file__).parent
    for name, rows in (
        ("golden.json", orders),
        ("blends.json", [blend(weights, size) for weights, size in BLENDS]),
    ):
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        (here / name).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
