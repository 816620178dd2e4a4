"""A byte-level byte-pair encoding on tiktoken, where that is exact.

GPT-2's definition merges the *listed pair* that comes first in merges.txt. tiktoken merges any two
neighbours whose *concatenation* is a token, the token of lowest rank first; it is several times
faster. With rank = position in merges.txt the two agree on every text when

1. each single byte is a token,
2. no two merges make the same token, and none makes a single byte,
3. the parts of a merge are bytes or made by earlier merges,
4. the definition encodes the bytes of each merged token as that one token.

By induction over the ranks: let both agree while only ranks below k may be used. Merges happen in
the order of their ranks (3), so by (4) the definition without rank k and above ends on token k's
bytes with exactly the pair of merge k, and so does tiktoken. Inside a longer text, two neighbours
that concatenate to token k were, until the moment rank k is the lowest left, encoded as if they
stood alone; so they are that very pair, and both make the same merge.
"""

from __future__ import annotations

import numpy as np
import tiktoken
from tokenizers import models

from megatron.tokenizer.byte_level import CHARACTER_OF_BYTE, Merges, Vocabulary, token_bytes
from megatron.tokenizer.protocol import TokenIds

# GPT-2 splits text by 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+.
# This is the same split. What needs no look-ahead is in one group, which the regex engine compiles
# to an automaton, instead of backtracking: 1.7 times the speed.
_SPLIT = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"


class RankedEncoding:
    """Encodes with tiktoken; its ranks are mapped to the vocabulary's ids."""

    def __init__(self, vocab: Vocabulary, merges: Merges, special: str | None) -> None:
        """For a vocabulary that passes `is_exact`; `special` is a token found in text as such."""
        tokens = [*CHARACTER_OF_BYTE, *(left + right for left, right in merges)]
        specials = {} if special is None else {special: len(tokens)}
        self._encoding = tiktoken.Encoding(
            "byte-level",
            pat_str=_SPLIT,
            mergeable_ranks={token_bytes(token): rank for rank, token in enumerate(tokens)},
            special_tokens=specials,
        )
        self._specials = set(specials)
        self.id_of_rank = np.array([vocab[token] for token in (*tokens, *specials)], np.int32)

    def encode(self, text: str) -> TokenIds:
        """Ids of a text.

        Raises:
            ValueError: a lone surrogate, or a run of about a million white-space characters, which
                is more than the regex engine can take back.
        """
        ranks = self._encoding.encode_to_numpy(
            text, allowed_special=self._specials, disallowed_special=()
        )
        return self.id_of_rank[ranks]


def is_exact(vocab: Vocabulary, merges: Merges, definition: models.BPE) -> bool:
    """Whether `RankedEncoding` gives the ids of `definition` for every text."""
    made = set(CHARACTER_OF_BYTE)
    if not made <= vocab.keys():
        return False
    for left, right in merges:
        token = left + right
        if left not in made or right not in made or token in made:
            return False
        made.add(token)
        if len(definition.tokenize(token)) != 1:
            return False
    return True
