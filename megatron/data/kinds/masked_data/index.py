"""What BERT's and T5's datasets share: their cached index, and numbers of samples."""

from __future__ import annotations

import numpy as np

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.masked_data.segments import SegmentRules, build_segments
from megatron.data.kinds.masked_data.sentences import Sentences
from megatron.data.samples import Documents
from megatron.util.digests import digest

# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1
NO_LABEL = -1
"""The label where there is nothing to predict, as in Megatron; no token has it."""


def segment_index(
    documents: Documents,
    units: range,
    rules: SegmentRules,
    num_samples: int,
    seed: int,
    name: str,
    cache: IndexCache,
    kind: str,
) -> StoredArrays:
    """The sentences of each sample, and what finds them in the documents, built or cached.

    Raises:
        ValueError: no sample can be made of the documents.
    """
    boundaries = documents.document_indices[units.start : units.stop + 1]
    depends_on = {
        "version": INDEX_VERSION,
        "sequence lengths": documents.lengths_digest,
        "documents": [units.start, units.stop],
        "document boundaries": digest(boundaries.tobytes()),
        "tokens": rules.max_tokens,
        "short sequences": rules.short_seq_prob,
        "pairs": rules.pairs,
        "samples": num_samples,
        "seed": seed,
        "part": name,
    }

    def arrays() -> dict[str, np.ndarray]:
        documents.verify()
        sentences = Sentences.of(documents, units, rules.max_tokens)
        segments = build_segments(sentences, rules, num_samples, seed, name, documents.prefix)
        return {"segments": segments, **sentences.numbers.arrays()}

    return cache.arrays(f"{kind}-{name}", depends_on, arrays)
