"""Embeddings of texts by one encoder of a retriever, the file that stores them, and exact
nearest-neighbour search.

Shape suffixes: N texts, Q questions, D elements of an embedding, K retrieved passages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron.apps.tasks.retrieval.matching import EvidencePassage
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.features.evaluation.checkpoints import MadeSamples, measure_samples
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.features.masked.heads import LabelledText, collate_labelled
from megatron.features.retrieval.family import VECTORS, encoder_spec
from megatron.features.retrieval.flags import IctConfig
from megatron.features.retrieval.samples import text
from megatron.formats.digests import checkpoint_digest, tokenizer_digest
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.util.digests import digest, digest_of_sample
from megatron.util.files import replacing
from megatron.util.processes import return_freed_memory

Vectors = npt.NDArray[np.float16]
_CHUNK = 32
"""Number of forward passes after which embeddings are converted from float64 to float16."""
_ELEMENTS = 2**24
"""Maximum number of scores to compute at a time."""


class PassageEncoder:
    """Tokenizer of questions and passages: adds special tokens, truncates to ``longest``."""

    def __init__(self, tokenizer: Tokenizer, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest

    @classmethod
    def of(cls, run: Run) -> PassageEncoder:
        model, flags = run.config.model, run.config.section(IctConfig)
        longest = model.positions.longest
        wanted = flags.retriever_seq_length
        return cls(run.tokenizer, wanted if longest is None else min(wanted, longest))

    def question(self, asked: str) -> npt.NDArray[np.int64]:
        """Return the token ids of ``[CLS] question [SEP]``."""
        return self._whole([asked])

    def passage(self, title: str, body: str) -> npt.NDArray[np.int64]:
        """Return the ids of ``[CLS] title [SEP] text [SEP]``, as in the inverse cloze task."""
        return self._whole([title, body])

    def _whole(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        sep, tokens = self.tokenizer.sep, [self.tokenizer.cls]
        for ids in self.tokenizer.tokenize_sentences(texts):
            tokens += [*np.asarray(ids).tolist(), sep]
        if len(tokens) > self.longest:
            tokens = [*tokens[: self.longest - 1], sep]
        return np.array(tokens, np.int64)


@contextmanager
def opened_encoder(
    run: Run, mesh: Mesh, checkpoint: FoundCheckpoint, queries: bool
) -> Iterator[Evaluator]:
    """Build one encoder of a retriever with the weights of a checkpoint, as a context manager.
    ``queries`` selects the query encoder, otherwise the context encoder is built."""
    spec = encoder_spec(run.config.model, run.config.parallel, queries)
    engine = build_evaluator(run.config, spec, mesh, training_device())
    load_checkpoint(engine, checkpoint, weights_only=True)
    yield engine
    del engine
    return_freed_memory()


def embed(
    engine: Evaluator,
    items: Sequence[Any],
    encode: Callable[[Any], npt.NDArray[np.int64]],
    pad: int,
    size: int,
    progress: Callable[[int, int], object] = lambda batches, texts: None,
) -> Vectors:
    """Return the embeddings of items, float16 [N, D], the same on every rank. Collective: every
    rank must call it. ``encode`` tokenizes an item. ``progress`` is called with the numbers of
    forward passes and texts so far."""
    ranks, parts = engine.mesh.samples.size, []
    chunk = _CHUNK * size * ranks
    collate = partial(collate_labelled, pad=pad)
    for start in range(0, len(items), chunk):
        rows: list[LabelledText] = [text(encode(item)) for item in items[start : start + chunk]]
        lengths = [row.length for row in rows]
        samples = MadeSamples(rows, lambda row: row)
        numbers = measure_samples(engine, samples, collate, VECTORS, size, lengths)
        parts.append(numbers["vector"].astype(np.float16))
        done = start + len(rows)
        progress(-(-done // (size * ranks)), done)
    return np.concatenate(parts)


def identity(run: Run, checkpoint: FoundCheckpoint, evidence: str) -> dict[str, str]:
    """Return values that identify everything the passages' embeddings depend on."""
    model = run.config.model.shaping()
    return {
        "checkpoint": checkpoint_digest(checkpoint.folder),
        "model": digest(json.dumps(model, sort_keys=True, default=str)),
        "tokenizer": tokenizer_digest(run.config.tokenizer),
        "tokens": str(PassageEncoder.of(run).longest),
        "passages": digest_of_sample(Path(evidence)),
    }


def save_vectors(
    path: Path, vectors: Vectors, passages: Sequence[EvidencePassage], about: dict[str, str]
) -> None:
    """Write ``vectors`` and ``ids`` as safetensors. The file appears when it is complete."""
    ids = torch.tensor([passage.identity for passage in passages])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({"vectors": torch.from_numpy(vectors), "ids": ids}, temporary, metadata=about)


def load_vectors(path: Path, passages: Sequence[EvidencePassage], about: dict[str, str]) -> Vectors:
    """Return the passage embeddings stored in a file. Raises ConfigError if the file cannot be
    read, or if it was computed from other passages or another model."""
    flag = f"--embedding-path {path}"
    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            saved = file.metadata() or {}
            other = [name for name, value in about.items() if saved.get(name) != value]
            if other:
                raise ConfigError(
                    f"{flag} has vectors of another {' and '.join(other)} than this run: give the "
                    "checkpoint, flags and passages that made it, or another --embedding-path"
                )
            vectors, ids = file.get_tensor("vectors"), file.get_tensor("ids")
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} is not a file of vectors that this program wrote ({error}); name another, "
            "which is computed where it does not exist"
        ) from None
    if ids.tolist() != [passage.identity for passage in passages]:
        raise ConfigError(f"{flag} has the vectors of {len(ids)} passages with other numbers")
    array: Vectors = vectors.numpy()
    return array


def nearest(
    vectors_ND: Vectors, queries_QD: npt.NDArray[Any], k: int, device: torch.device
) -> npt.NDArray[np.int64]:
    """Return the indices of the ``k`` embeddings with the largest inner products with each query,
    int64 [Q, K], in descending order. Ties go to the smaller index. If there are fewer than ``k``
    embeddings, the remaining entries are -1. The search is exact, in float32."""
    queries = torch.from_numpy(queries_QD).to(device, torch.float32)
    best_QK = queries.new_full((len(queries), k), float("-inf"))
    numbers_QK = torch.full((len(queries), k), -1, device=device)
    step = max(1, _ELEMENTS // max(1, len(queries)))
    for start in range(0, len(vectors_ND), step):
        block = torch.from_numpy(vectors_ND[start : start + step]).to(device, torch.float32)
        numbers = torch.arange(start, start + len(block), device=device).expand(len(queries), -1)
        scores = torch.cat((best_QK, queries @ block.t()), 1)
        # A stable sort prefers earlier entries, which have smaller indices.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        best_QK = scores.gather(1, order)
        numbers_QK = torch.cat((numbers_QK, numbers), 1).gather(1, order)
    return numbers_QK.cpu().numpy()
