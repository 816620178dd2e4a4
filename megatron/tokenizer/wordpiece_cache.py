"""WordPiece by words that are kept: a text repeats most of its words.

BERT's encoding treats what lies between spaces, tabs and line ends by itself: its normalization
changes characters one by one, it never merges across white space, and no special token holds any.
So the ids of a text are those of its parts, one after another, and a part needs to be encoded only
once. Other white space is left inside of parts: some of it is dropped, not a boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import tokenizers
from tokenizers import models

from megatron.tokenizer.protocol import TokenIds

_BOUNDARIES = str.maketrans("\t\n\r", "   ")
_ASCII_WORDS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
_MOST_PARTS, _LONGEST_PART = 1 << 17, 64


class CachedWordPiece:
    """Gives the ids of `encoding.encode(text, add_special_tokens=False)`, several times faster."""

    def __init__(
        self, encoding: tokenizers.Tokenizer, vocab: Mapping[str, int], lower_case: bool
    ) -> None:
        """`encoding` is BERT's, over a vocabulary and its special tokens."""
        assert isinstance(encoding.model, models.WordPiece)
        self._encoding, self._model = encoding, encoding.model
        self._vocab, self._lower_case = vocab, lower_case
        specials = encoding.get_added_tokens_decoder().values()
        self._heads = "".join({token.content[0] for token in specials})
        self._ids_of_part: dict[str, list[int]] = {}

    def encode(self, text: str) -> TokenIds:
        """Ids of a text that is valid Unicode."""
        parts = text.translate(_BOUNDARIES).split(" ")
        known = self._ids_of_part
        if len(known) > _MOST_PARTS:
            known.clear()
        long: dict[str, list[int]] = {}
        for part in parts:
            if part not in known:
                (known if len(part) <= _LONGEST_PART else long)[part] = self._encode_part(part)
        rows: Iterable[list[int]] = map(known.__getitem__, parts)
        if long:
            rows = (long[part] if part in long else known[part] for part in parts)
        return np.fromiter(chain.from_iterable(rows), np.int32)

    def _encode_part(self, part: str) -> list[int]:
        # Of ASCII, words are runs of letters and digits, and all other characters.
        if not (part.isascii() and part.isprintable()) or any(c in part for c in self._heads):
            return self._encoding.encode(part, add_special_tokens=False).ids
        ids: list[int] = []
        for word in _ASCII_WORDS.findall(part.lower() if self._lower_case else part):
            i = self._vocab.get(word)
            if i is None:
                ids += [token.id for token in self._model.tokenize(word)]
            else:
                ids.append(i)
        return ids
