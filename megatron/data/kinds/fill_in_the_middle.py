"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255) on samples of a GPT.

A document is cut at two random characters into prefix, middle and suffix, which are tokenized
again, each by itself, and put in one of two orders:

    PSM   <prefix token> prefix <suffix token> suffix <middle token> middle
    SPM   <prefix token> <suffix token> suffix <middle token> prefix middle

As in Megatron it happens within a sample: what is cut is the part of a document that lies in it.

Shape suffix: T the S + 1 tokens of a sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron.config.kinds.fill_in_the_middle import FimConfig
from megatron.data.index_cache import IndexCache
from megatron.data.kinds.raw_text import text_encoder
from megatron.data.pipeline import DataKind, DataPipeline, SampleTokens
from megatron.data.samples import Documents, Piece, SampleDataset, SampleRecipe
from megatron.data.text_encoder import TextEncoder
from megatron.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

_REPLACEMENT = "\ufffd"


class FillInTheMiddle(DataKind):
    """See :class:`DataKind`."""

    def recipe(self, data: DataPipeline, recipe: SampleRecipe[np.ndarray]) -> FimRecipe:
        """See :meth:`DataKind.recipe`."""
        config = data.config.kind(FimConfig)
        return FimRecipe.from_config(recipe, config, text_encoder(data), data.seed)

    def special_tokens(self, data: DataPipeline) -> SampleTokens:
        """See :meth:`DataKind.special_tokens`."""
        tokens = FimTokens.of(data.config.kind(FimConfig), data.tokenizer)
        return SampleTokens(tokens.pad, tokens.eod)


KIND = FillInTheMiddle()


@dataclass(frozen=True)
class FimTokens:
    """Ids of the tokens between the parts of a document, and around documents."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None

    @classmethod
    def of(cls, config: FimConfig, tokenizer: Tokenizer) -> FimTokens:
        """The tokens that the flags name.

        Raises:
            ValueError: the vocabulary lacks one, or two are the same; the message names flag and
                token.
        """

        def find(field: str) -> int:
            text = getattr(config, field)
            found = token_id(tokenizer, text)
            if found is None:
                raise ValueError(
                    f"--{field.replace('_', '-')} {text}: the vocabulary has no such token; add it "
                    "to the tokenizer (additional_special_tokens of a Hugging Face folder), or "
                    "name the one that stands for it"
                )
            return found

        prefix, middle, suffix = (
            find(f"fim_{part}_token") for part in ("prefix", "middle", "suffix")
        )
        pad = find("fim_pad_token")
        eod = tokenizer.eod if config.fim_eod_token is None else find("fim_eod_token")
        if pad == eod:
            raise ValueError(
                f"--fim-pad-token {config.fim_pad_token} is the end of document too, and the loss "
                "never asks for padding: name another token"
            )
        return cls(
            prefix=prefix,
            middle=middle,
            suffix=suffix,
            pad=pad,
            eod=eod,
            split=None if config.fim_split_sample is None else find("fim_split_sample"),
        )


@dataclass(frozen=True)
class FimRecipe:
    """Samples of another recipe, with a part of their documents cut."""

    samples: SampleRecipe[np.ndarray]
    """Makes samples of S + 1 tokens."""
    config: FimConfig
    tokens: FimTokens
    encoder: TextEncoder
    """Its tokenizer is the one of the documents."""
    seed: int

    @classmethod
    def from_config(
        cls, samples: SampleRecipe[np.ndarray], config: FimConfig, encoder: TextEncoder, seed: int
    ) -> FimRecipe:
        """Checks the flags and finds the tokens.

        Raises:
            ValueError: a rate is none, the vocabulary lacks a token, or the tokenizer puts spaces
                between texts.
        """
        config.check()
        tokenizer = encoder.tokenizer
        tokens = FimTokens.of(config, tokenizer)
        pieces = Pieces(tokenizer)
        joined = [*pieces.tokenize("a"), *pieces.tokenize("b")]
        if tokenizer.detokenize(joined) != "ab":
            raise ValueError(
                f"--fim-data: the tokenizer makes {tokenizer.detokenize(joined)!r} of the pieces "
                "'a' and 'b'; a text can be cut and put together again with a byte-level one only "
                "(GPT2BPETokenizer, TikTokenizer, most of HFTokenizer)"
            )
        return cls(samples, config, tokens, encoder, seed)

    def units(self, documents: Documents) -> int:
        """As the recipe of the samples."""
        return self.samples.units(documents)

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> FimDataset:
        """As the recipe of the samples; nothing more is cached."""
        return FimDataset(
            self.samples.build(documents, units, num_samples, name, cache), self, name
        )


class FimDataset:
    """Samples with documents cut; sample i is a function of seed, part and i."""

    def __init__(self, samples: SampleDataset[np.ndarray], recipe: FimRecipe, name: str) -> None:
        self.samples, self.recipe, self._name = samples, recipe, name

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Ids:
        """int64[S + 1]: cut off, or filled up by the padding token, where it is not as long as it
        was."""
        tokens_T = self.samples[index]
        seed = [self.recipe.seed, zlib.crc32(self._name.encode()), int(index)]
        cut = DocumentCutter(self.recipe, np.random.default_rng(seed))
        parts: list[Ids] = []
        start = 0
        for end in [*np.flatnonzero(tokens_T == self.recipe.tokens.eod).tolist(), len(tokens_T)]:
            parts += [cut(tokens_T[start:end]), tokens_T[end : end + 1]]
            start = end + 1
        sample_T = np.full(len(tokens_T), self.recipe.tokens.pad, np.int64)
        found = np.concatenate(parts)[: len(tokens_T)]
        sample_T[: len(found)] = found
        return sample_T

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Where the tokens come from, in the order before the cut."""
        return self.samples.origin(index)


class DocumentCutter:
    """Cuts the documents of one sample; each has its turn with the random numbers."""

    def __init__(self, recipe: FimRecipe, rng: np.random.Generator) -> None:
        self._config, self._tokens, self._rng = recipe.config, recipe.tokens, rng
        self._pieces = Pieces(recipe.encoder.tokenizer)

    def __call__(self, document: Ids) -> Ids:
        """A document, without its end; or its fragments, with what splits them between."""
        config, split = self._config, self._tokens.split
        splits = [] if split is None else np.flatnonzero(document == split).tolist()
        if not splits:
            return self._maybe_cut(document, config.fim_rate)
        if self._rng.random() >= config.fim_rate:
            return document
        rate = config.fim_rate if config.fim_fragment_rate is None else config.fim_fragment_rate
        parts, start = [], 0
        for end in [*splits, len(document)]:
            parts += [self._maybe_cut(document[start:end], rate), document[end : end + 1]]
            start = end + 1
        return np.concatenate(parts)

    def _maybe_cut(self, document: Ids, rate: float) -> Ids:
        if not len(document) or self._rng.random() >= rate:
            return document
        text = self._pieces.detokenize(document.tolist())
        if _REPLACEMENT in text:  # the sample begins or ends inside a character: text would be lost
            return document
        no_prefix = self._config.fim_no_prefix
        if no_prefix is not None and text.startswith(no_prefix):
            return document
        first, last = sorted(self._rng.integers(0, len(text) + 1, size=2).tolist())
        texts = (text[:first], text[first:last], text[last:])
        prefix, middle, suffix = (self._pieces.tokenize(part) for part in texts)
        tokens = self._tokens
        if self._rng.random() < self._config.fim_spm_rate:
            before = [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix]
        else:
            before = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
        return np.array([*before, *middle], np.int64)


class Pieces:
    """Tokens of parts of a text, without the ones that begin or end a whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Ids of the text alone."""
        ids = self._tokenizer.tokenize(text)
        before, behind = self._added
        return ids[before : len(ids) - behind]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._tokenizer.detokenize(ids)

    @cached_property
    def _added(self) -> tuple[int, int]:
        """How many tokens every text begins and ends with."""
        added, with_text = self._tokenizer.tokenize(""), self._tokenizer.tokenize("a")
        before = 0
        while before < len(added) and added[before] == with_text[before]:
            before += 1
        return before, len(added) - before


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Id of the one token that a text is; None where it is several."""
    try:
        ids = Pieces(tokenizer).tokenize(text)
        return ids[0] if len(ids) == 1 and tokenizer.detokenize(ids) == text else None
    except ValueError:  # not a text for this tokenizer
        return None
