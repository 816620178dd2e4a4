"""Samples of examples, one each or packed, epoch after epoch.

Shape suffixes: S sequence, T the S + 1 tokens of a sample.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_batch import best_fit, padding_token
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Documents, PackedSample, Piece, checked_index
from megatron.features.instruction.examples import InstructionExamples
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.held_out import of_prompts
from megatron.tokenizer import Tokenizer
from megatron.util.digests import digest

logger = logging.getLogger(__name__)

# Part of the cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


@dataclass(frozen=True)
class InstructionRecipe:
    """Samples of seq_length + 1 tokens: whole examples and padding. Every epoch shuffles the
    examples, packs them in that order, and shuffles the samples; its order is a function of seed,
    part and the epoch's number."""

    seq_length: int
    """Tokens a sample feeds to the model."""
    seed: int
    pad_token: int
    """Fills up samples; it never counts in the loss."""
    packing: bool = False
    skip_long: bool = False
    """Leave out examples of more than seq_length + 1 tokens, instead of cutting their end off."""
    pads: bool = True
    """Whether samples are filled up here, or with the others of their batch."""
    by_prompt: bool = False
    """Parts have whole prompts, drawn by their hash, and not consecutive examples."""

    @classmethod
    def from_config(
        cls, config: InstructionConfig, seq_length: int, seed: int, tokenizer: Tokenizer
    ) -> InstructionRecipe:
        """See :func:`padding_token`."""
        pad = padding_token(tokenizer)
        skip = config.on_long_example == "skip"
        return cls(
            seq_length,
            seed,
            pad,
            config.packing,
            skip,
            pads=not config.pads_batches,
            by_prompt=config.split_by == "prompt",
        )

    def units(self, documents: Documents) -> int:
        return len(documents)

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> InstructionDataset:
        """At least `num_samples` samples of the examples `units`, or their order from the cache.
        Raises ValueError if the documents are not examples, or none has an answer within seq_length
        + 1 tokens."""
        if not isinstance(documents, InstructionExamples):
            raise ValueError(
                f"{documents.prefix} contains documents without a loss mask; --sft needs files of "
                "instructions and answers (JSON, JSON lines, Parquet, CSV)"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "lengths": documents.lengths_digest,
            "counted": digest(documents.first_counted.tobytes()),
            "examples": [units.start, units.stop],
            "part": name,
            "seq length": self.seq_length,
            "samples": num_samples,
            "seed": self.seed,
            "packing": self.packing,
            "skip long": self.skip_long,
        }

        if self.by_prompt:
            depends_on["split by prompt"] = True

        def arrays() -> dict[str, np.ndarray]:
            documents.verify()
            numbers = np.arange(units.start, units.stop)
            if self.by_prompt:
                numbers = of_prompts(documents.prompt_hashes, units, f"{documents.prefix}, {name}")
            usable = self._usable(documents, numbers, name)
            return self._order(documents, usable, num_samples, name)

        index = cache.arrays(f"instruction-{name}", depends_on, arrays)
        return InstructionDataset(documents, self, index)

    def _usable(
        self, documents: InstructionExamples, units: npt.NDArray[np.int64], name: str
    ) -> np.ndarray:
        capacity = self.seq_length + 1
        lengths = documents.sequence_lengths[units]
        answered = documents.first_counted[units] < np.minimum(lengths, capacity)
        is_long = lengths > capacity
        usable = units[answered & ~is_long if self.skip_long else answered]
        if not len(usable):
            raise ValueError(
                f"{documents.prefix}: none of the {len(units)} examples for {name} has an answer "
                f"within --seq-length {self.seq_length}; a longer one is needed, or examples and "
                "a chat template that writes their answers (tools/show_batch.py shows them)"
            )
        if is_long.any() or not answered.all():
            cut = 0 if self.skip_long else (is_long & answered).sum()
            logger.warning(
                f"{documents.prefix}, {name}: of {len(units)} examples {is_long.sum()} are longer "
                f"than --seq-length {self.seq_length}; {cut} are cut off there, "
                f"{len(units) - len(usable)} left out ({(~answered).sum()} of them without an "
                "answer before that)"
            )
        return usable

    def _order(
        self, documents: InstructionExamples, usable: np.ndarray, num_samples: int, name: str
    ) -> dict[str, np.ndarray]:
        capacity = self.seq_length + 1
        lengths = np.minimum(documents.sequence_lengths, capacity)
        examples, sizes = [], []
        samples = epoch = 0
        while samples < num_samples:
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), epoch])
            order = rng.permutation(usable)
            sample_of = np.arange(len(order))
            if self.packing:
                packed = best_fit(lengths, order, capacity)
                sample_of = np.argsort(rng.permutation(packed.max() + 1))[packed]
            examples.append(order[np.argsort(sample_of, kind="stable")])
            sizes.append(np.bincount(sample_of))
            samples += len(sizes[-1])
            epoch += 1
        padding = 1 - lengths[usable].sum() / (len(sizes[0]) * capacity)
        logger.info(
            f"{documents.prefix}, {name}: {len(usable)} examples in {len(sizes[0])} samples an "
            f"epoch, {100 * padding:.1f} % of their tokens padding"
        )
        bounds = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        return {"examples": np.concatenate(examples), "bounds": bounds}


class InstructionDataset:
    def __init__(
        self, examples: InstructionExamples, recipe: InstructionRecipe, index: StoredArrays
    ) -> None:
        self.examples, self.recipe, self._index = examples, recipe, index

    def __len__(self) -> int:
        return len(self._index["bounds"]) - 1

    def __getitem__(self, index: int, /) -> PackedSample:
        """Its examples, each a document of its own, then padding."""
        pieces = self.origin(index)
        capacity = self.recipe.seq_length + 1
        if not self.recipe.pads:
            capacity = sum(piece.stop for piece in pieces)
        tokens_T = np.full(capacity, self.recipe.pad_token, np.int64)
        counted_T = np.zeros(capacity, np.float32)
        documents_T = np.full(capacity, len(pieces), np.int64)
        start = 0
        for number, piece in enumerate(pieces):
            stop = start + piece.stop
            tokens_T[start:stop] = self.examples.get(piece.sequence, 0, piece.stop)
            # The first token never counts, so no document predicts the next.
            counted_T[start:stop] = self.examples.counted(piece.sequence, 0, piece.stop)
            documents_T[start:stop] = number
            start = stop
        return PackedSample(tokens_T, counted_T[1:].copy(), documents_T[:-1].copy())

    def origin(self, index: int, /) -> list[Piece]:
        index = checked_index(index, len(self))
        capacity = self.recipe.seq_length + 1
        first, last = self._index["bounds"][index : index + 2].tolist()
        return [
            Piece(
                self.examples.prefix,
                example,
                0,
                min(int(self.examples.sequence_lengths[example]), capacity),
            )
            for example in self._index["examples"][first:last].tolist()
        ]
