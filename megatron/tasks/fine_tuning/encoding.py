"""From texts to the tokens of an encoder: ``[CLS] a [SEP] b [SEP]``, cut at the right end.

Shape suffix: S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.data.labelled_text import LabelledText
from megatron.tasks.fine_tuning.examples import LabelledExample, RaceQuestion
from megatron.tasks.fine_tuning.race import answered
from megatron.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PairEncoder:
    """Encodes texts with the special tokens of a tokenizer, at most ``seq_length`` tokens each."""

    tokenizer: Tokenizer
    seq_length: int

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Ids of texts, without special tokens."""
        return list(self.tokenizer.tokenize_sentences(texts))

    def pair(
        self, first: npt.NDArray[np.integer], second: npt.NDArray[np.integer] | None
    ) -> tuple[Ids, Ids]:
        """Tokens and types [S]; a sequence that would reach ``seq_length`` is cut to one token less
        before it gets its last separator."""
        cls, sep = self.tokenizer.cls, self.tokenizer.sep
        parts = [np.array([cls]), first, np.array([sep])]
        parts += [] if second is None else [second]
        tokens = np.concatenate(parts).astype(np.int64)
        types = (np.arange(len(tokens)) > len(first) + 1).astype(np.int64)
        cut = len(tokens) >= self.seq_length
        if cut:
            tokens, types = tokens[: self.seq_length - 1], types[: self.seq_length - 1]
        if cut or second is not None:
            tokens, types = np.append(tokens, sep), np.append(types, int(second is not None))
        return tokens, types


@dataclass(frozen=True)
class EncodedExamples:
    """Examples as samples, encoded when they are read."""

    examples: Sequence[LabelledExample]
    encoder: PairEncoder

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> LabelledText:
        example = self.examples[index]
        ids = self.encoder.tokens(example.texts)
        tokens, types = self.encoder.pair(ids[0], ids[1] if len(ids) > 1 else None)
        return LabelledText((tokens,), (types,), _label(example.label), example.identity)

    def origin(self, index: int, /) -> tuple[()]:
        """Not of an indexed file."""
        return ()


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions as samples of one text per option: the question with the option, at most
    ``max_qa_length`` tokens of it, and the article."""

    questions: Sequence[RaceQuestion]
    encoder: PairEncoder
    max_qa_length: int

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int, /) -> LabelledText:
        asked = self.questions[index]
        texts = [asked.article, *(answered(asked.question, option) for option in asked.options)]
        article, *options = self.encoder.tokens(texts)
        pairs = [self.encoder.pair(ids[: self.max_qa_length], article) for ids in options]
        tokens, types = zip(*pairs, strict=True)
        return LabelledText(tokens, types, _label(asked.label), asked.identity)

    def origin(self, index: int, /) -> tuple[()]:
        """Not of an indexed file."""
        return ()


def _label(label: int | float | None) -> int | float:
    """Nothing depends on the label of a test file's rows."""
    return 0 if label is None else label
