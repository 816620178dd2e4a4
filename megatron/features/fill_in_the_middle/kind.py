"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255) on samples of a GPT.

A document is cut at two random characters into prefix, middle and suffix. They are tokenized again,
separately, and put in one of two orders:

    PSM   <prefix token> prefix <suffix token> suffix <middle token> middle
    SPM   <prefix token> <suffix token> suffix <middle token> prefix middle

As in Megatron, this happens within a sample: only the part of a document in it is cut.

Shape suffix: T the S + 1 tokens of a sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import DataKind, DataPipeline, SampleTokens
from megatron.data.samples import Documents, Piece, SampleDataset, SampleRecipe
from megatron.features.fill_in_the_middle.flags import FimConfig
from megatron.features.raw_text.encoder import TextEncoder, TextSettings
from megatron.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

_REPLACEMENT = "\ufffd"


class FillInTheMiddle(DataKind):
    """Data kind that rearranges the documents in a GPT's samples for fill-in-the-middle."""

    def recipe(self, data: DataPipeline, recipe: SampleRecipe[np.ndarray]) -> FimRecipe:
        config = data.config.section(FimConfig)
        encoder = TextEncoder(TextSettings(data.config.tokenizer), data.tokenizer)
        return FimRecipe.from_config(recipe, config, encoder, data.seed)

    def special_tokens(self, data: DataPipeline) -> SampleTokens:
        tokens = FimTokens.of(data.config.section(FimConfig), data.tokenizer)
        return SampleTokens(tokens.pad, tokens.eod)


KIND = FillInTheMiddle()


@dataclass(frozen=True)
class FimTokens:
    """Ids of the special tokens around the three pieces of a document, and around documents."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None

    @classmethod
    def of(cls, config: FimConfig, tokenizer: Tokenizer) -> FimTokens:
        """Return the tokens given by the flags. Raises ValueError if one is not in the vocabulary,
        or padding and end of document are the same."""
        ids = {}
        for name in ("prefix", "middle", "suffix", "pad", "eod", "split"):
            field = "fim_split_sample" if name == "split" else f"fim_{name}_token"
            text = getattr(config, field)
            if text is None:
                if name == "eod":
                    ids[name] = tokenizer.eod
                continue
            token = token_id(tokenizer, text)
            if token is None:
                raise ValueError(
                    f"--{field.replace('_', '-')} {text}: the vocabulary has no such token; add it "
                    "to the tokenizer (additional_special_tokens of a Hugging Face folder), or "
                    "name its own token for this"
                )
            ids[name] = token
        tokens = cls(**ids)
        if tokens.pad == tokens.eod:
            raise ValueError(
                f"--fim-pad-token {config.fim_pad_token} is the end of document too, and padding "
                "does not count in the loss: name another token"
            )
        return tokens


@dataclass(frozen=True)
class FimRecipe:
    """Recipe that takes the samples of another recipe and rearranges some of their documents."""

    samples: SampleRecipe[np.ndarray]
    """Recipe for samples of S + 1 tokens."""
    config: FimConfig
    tokens: FimTokens
    encoder: TextEncoder
    """Encoder with the tokenizer of the documents."""
    seed: int

    @classmethod
    def from_config(
        cls, samples: SampleRecipe[np.ndarray], config: FimConfig, encoder: TextEncoder, seed: int
    ) -> FimRecipe:
        """Check the flags and look up the tokens. Raises ValueError if a rate is out of range, a
        token is not in the vocabulary, or the tokenizer puts spaces between texts."""
        config.check()
        tokens = FimTokens.of(config, encoder.tokenizer)
        pieces = PieceTokenizer(encoder.tokenizer)
        joined = encoder.tokenizer.detokenize([*pieces.tokenize("a"), *pieces.tokenize("b")])
        if joined != "ab":
            raise ValueError(
                f"--fim-data: the tokenizer makes {joined!r} of the pieces 'a' and 'b'; only with "
                "a byte-level one can a text be cut and joined again (GPT2BPETokenizer, "
                "TikTokenizer, most of HFTokenizer)"
            )
        return cls(samples, config, tokens, encoder, seed)

    def units(self, documents: Documents) -> int:
        return self.samples.units(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> FimDataset:
        """Build the samples of the other recipe. Documents are rearranged when a sample is read, so
        no further index is cached."""
        samples = self.samples.build(documents, units, num_samples, name, cache)
        return FimDataset(samples, self, name)


class FimDataset:
    """Dataset whose documents are rearranged for fill-in-the-middle. The randomness of sample i
    depends only on the seed, the split ``name`` and i."""

    def __init__(self, samples: SampleDataset[np.ndarray], recipe: FimRecipe, name: str) -> None:
        self.samples, self.recipe, self._name = samples, recipe, name

    def __reduce__(self) -> tuple[type[FimDataset], tuple[Any, ...]]:
        return type(self), (self.samples, self.recipe, self._name)

    @cached_property
    def _pieces(self) -> PieceTokenizer:
        return PieceTokenizer(self.recipe.encoder.tokenizer)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Ids:
        """Return a sample, int64[S + 1], truncated or padded to its original length."""
        tokens_T = self.samples[index]
        tokens = self.recipe.tokens
        rng = np.random.default_rng([self.recipe.seed, zlib.crc32(self._name.encode()), int(index)])
        sample = _each_part(tokens_T, tokens.eod, lambda part: self._document(part, rng))
        sample_T = np.full(len(tokens_T), tokens.pad, np.int64)
        sample_T[: len(sample)] = sample[: len(tokens_T)]
        return sample_T

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.samples.origin(index)

    def _document(self, document: Ids, rng: np.random.Generator) -> Ids:
        config, split = self.recipe.config, self.recipe.tokens.split
        if split is None or split not in document:
            return self._maybe_cut(document, config.fim_rate, rng)
        if rng.random() >= config.fim_rate:
            return document
        rate = config.fim_rate if config.fim_fragment_rate is None else config.fim_fragment_rate
        return _each_part(document, split, lambda part: self._maybe_cut(part, rate, rng))

    def _maybe_cut(self, document: Ids, rate: float, rng: np.random.Generator) -> Ids:
        config, tokens, pieces = self.recipe.config, self.recipe.tokens, self._pieces
        if not len(document) or rng.random() >= rate:
            return document
        text = pieces.tokenizer.detokenize(document.tolist())
        # The sample begins or ends inside a character, which decoding would lose.
        if _REPLACEMENT in text:
            return document
        if config.fim_no_prefix is not None and text.startswith(config.fim_no_prefix):
            return document
        first, last = sorted(rng.integers(0, len(text) + 1, size=2).tolist())
        texts = (text[:first], text[first:last], text[last:])
        prefix, middle, suffix = map(pieces.tokenize, texts)
        if rng.random() < config.fim_spm_rate:
            before = [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix]
        else:
            before = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
        return np.array([*before, *middle], np.int64)


def _each_part(ids: Ids, separator: int, change: Callable[[Ids], Ids]) -> Ids:
    parts: list[Ids] = []
    start = 0
    for end in [*np.flatnonzero(ids == separator).tolist(), len(ids)]:
        parts += [change(ids[start:end]), ids[end : end + 1]]
        start = end + 1
    return np.concatenate(parts)


@dataclass(frozen=True)
class PieceTokenizer:
    """Tokenizer of parts of a text, without the tokens that begin or end a whole text."""

    tokenizer: Tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the text alone."""
        ids = self.tokenizer.tokenize(text)
        before, after = self._added
        return ids[before : len(ids) - after]

    @cached_property
    def _added(self) -> tuple[int, int]:
        """Number of tokens that the tokenizer adds at the beginning and end of every text."""
        added, with_text = self.tokenizer.tokenize(""), self.tokenizer.tokenize("a")
        before = 0
        while before < len(added) and added[before] == with_text[before]:
            before += 1
        return before, len(added) - before


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    try:
        ids = PieceTokenizer(tokenizer).tokenize(text)
        return ids[0] if len(ids) == 1 and tokenizer.detokenize(ids) == text else None
    except ValueError:  # the tokenizer cannot encode this text
        return None
