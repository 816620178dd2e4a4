"""GPT-2's byte-level byte-pair encoding, from any vocab.json and merges.txt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron.config import TokenizerConfig
from megatron.tokenizer.byte_level import (
    Merges,
    Vocabulary,
    read_merges,
    read_vocabulary,
    starts_with_space,
    token_bytes,
    write_vocabulary,
)
from megatron.tokenizer.fast import BatchEncoder
from megatron.tokenizer.files import refuse_extra_ids, required, write_json, write_text
from megatron.tokenizer.protocol import TokenIds, WordStarts
from megatron.tokenizer.ranked import RankedEncoding, is_exact
from megatron.tokenizer.special import SpecialIds
from megatron.tokenizer.textwise import TextwiseTokenizer

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(TextwiseTokenizer):
    """Gives the ids of `transformers.GPT2Tokenizer` over the same two files.

    As there, `<|endoftext|>` in a text is the end-of-document token (Megatron spells it out in
    ordinary tokens instead); with a vocabulary that lacks it, it is text, and there is no `eod`.
    """

    def __init__(self, vocab: Vocabulary, merges: Merges, source: str = "the vocabulary") -> None:
        """`source` names the vocabulary in messages."""
        end = vocab.get(END_OF_TEXT)
        super().__init__(source, SpecialIds(bos=end, eos=end, eod=end), hint=f" ({END_OF_TEXT})")
        self._vocab, self._merges = vocab, merges
        self._special_text = None if end is None else END_OF_TEXT
        self._definition = _definition(vocab, merges, self._special_text)
        self._vocab_size = max(vocab.values()) + 1

    # Made when they are needed: a training run asks for no more than the vocabulary's size.

    @cached_property
    def _ranked(self) -> RankedEncoding | None:
        if is_exact(self._vocab, self._merges, self._definition.model):
            return RankedEncoding(self._vocab, self._merges, self._special_text)
        return None

    @cached_property
    def _batches(self) -> BatchEncoder | None:
        if self._ranked is None:
            return None
        return BatchEncoder(self._ranked, self._merges, self._special_text)

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        return {i: token_bytes(token) for token, i in self._vocab.items()}

    @classmethod
    def from_files(cls, vocab_file: str | Path, merge_file: str | Path) -> GPT2BPETokenizer:
        """Reads vocab.json and merges.txt.

        Raises:
            FileNotFoundError: one of them is missing.
            ValueError: one of them is malformed, or they do not belong together.
        """
        vocab = read_vocabulary(str(vocab_file))
        merges = read_merges(str(merge_file), vocab, str(vocab_file))
        return cls(vocab, merges, source=f"--vocab-file {vocab_file}")

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> GPT2BPETokenizer:
        """From --vocab-file and --merge-file."""
        refuse_extra_ids(config)
        return cls.from_files(
            required(config, "vocab_file", "the path of vocab.json"),
            required(config, "merge_file", "the path of merges.txt"),
        )

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text."""
        if self._batches is None:
            return super().tokenize_batch(texts)
        return self._batches.encode(texts, self._encode)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, `<|endoftext|>` included."""
        try:
            pieces = [self._bytes_of_id[i] for i in ids]
        except KeyError as error:
            raise ValueError(
                f"token id {error.args[0]} is not in {self._source} of {len(self._vocab)} tokens"
            ) from None
        return b"".join(pieces).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes vocab.json, merges.txt, tokenizer.json and tokenizer_config.json."""
        directory = Path(directory)
        write_vocabulary(directory, self._vocab, self._merges)
        write_text(directory / "tokenizer.json", self._definition.to_str(pretty=True))
        write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "GPT2Tokenizer",
                "add_prefix_space": False,
                "errors": "replace",
                "bos_token": self._special_text,
                "eos_token": self._special_text,
                "unk_token": self._special_text,
            },
        )

    def _find_word_starts(self) -> WordStarts:
        marks = np.zeros(self._vocab_size, np.bool_)
        for i, token in self._bytes_of_id.items():
            marks[i] = starts_with_space(token)
        if END_OF_TEXT in self._vocab:
            marks[self._vocab[END_OF_TEXT]] = True
        return marks

    def _encode(self, text: str) -> TokenIds:
        if self._ranked is not None:
            try:
                return self._ranked.encode(text)
            except UnicodeEncodeError:
                raise
            except ValueError:  # white space without end: the definition takes its time over it
                pass
        text.encode()  # a lone surrogate is a ValueError that says so, not a TypeError
        return np.array(self._definition.encode(text).ids, np.int32)


def _definition(vocab: Vocabulary, merges: Merges, special: str | None) -> tokenizers.Tokenizer:
    """GPT-2's encoding as `transformers` sets it up; slower, and right for any vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special is not None:
        tokenizer.add_special_tokens([AddedToken(special, normalized=False, special=True)])
    return tokenizer
