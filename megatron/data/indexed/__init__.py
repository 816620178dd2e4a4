"""Megatron's indexed datasets, `PREFIX.bin` and `PREFIX.idx` (little endian).

    .bin   the tokens of all sequences, concatenated
    .idx   magic "MMIDIDX\\0\\0" | uint64 version 1 | uint8 dtype code
           | uint64 number of sequences n | uint64 number of document boundaries d
           | int32[n] tokens in each sequence | int64[n] byte offset of each sequence in .bin
           | int64[d] document boundaries: sequence numbers, the first 0, the last n
           | int8[n] mode of each sequence (multimodal data only)

A document is one or more sequences; a GPT corpus has one sequence per document.
"""

from megatron.data.indexed.dataset import IndexedDataset, best_dtype, bin_path, idx_path
from megatron.data.indexed.dataset_writer import IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter", "best_dtype", "bin_path", "idx_path"]
