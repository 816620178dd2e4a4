"""GPT-2's byte-level byte-pair encoding (BPE), built from any vocab.json and merges.txt.

Tokens are byte strings, written with one printable character per byte: the 188 bytes that are
printable in Latin-1 represent themselves, the 68 others are U+0100, U+0101, ... in byte order.

tiktoken is used where it is exact: it is nine times as fast as the definition in `tokenizers`. The
definition merges the *listed pair* that comes first in merges.txt. tiktoken merges any two
neighbours whose *concatenation* is a token, the token of lowest rank first. With rank = position in
merges.txt, both agree on every text if

1. each single byte is a token,
2. no two merges make the same token, and none makes a single byte,
3. the parts of a merge are bytes or made by earlier merges,
4. the definition encodes the bytes of each merged token as that one token.

Proof by induction over the ranks: assume that both agree while only ranks below k may be used.
Merges happen in the order of their ranks (3). So by (4) the definition, restricted to ranks below
k, reduces the bytes of token k to exactly the pair of merge k, and so does tiktoken. In a longer
text, two neighbours that concatenate to token k were encoded as if they stood alone until rank k
became the lowest rank left. So they are exactly that pair, and both make the same merge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.features import features
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    TokenizerType,
    WordStarts,
    check_size_of_ids,
    read_text,
    refuse_extra_ids,
    required,
    write_pretrained,
    write_text,
)
from megatron.util.json_text import parse_json

END_OF_TEXT = "<|endoftext|>"
Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]
# GPT-2 splits text by 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+.
# This pattern splits identically. Its alternatives without look-ahead form one group, which the
# regex engine compiles to an automaton instead of backtracking: 1.7 times the speed.
_SPLIT = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTER_OF_BYTE = _byte_alphabet()
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}


def token_bytes(token: str) -> bytes:
    """Return a token's bytes. If a character is outside the byte alphabet, encode all as UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def starts_with_space(token: bytes) -> bool:
    """Return whether a token begins with ASCII white space, and therefore begins a word."""
    return token[:1].isspace()


def read_vocabulary(path: str) -> Vocabulary:
    """Read the vocab.json of --vocab-file into a dictionary from token to id. Raises
    FileNotFoundError, or ValueError if it is not a JSON object of unique integer ids."""
    try:
        vocab = parse_json(read_text(path, "--vocab-file"), f"--vocab-file {path}", lenient=True)
    except ValueError as error:
        raise ValueError(f"{error}; it must be a vocab.json, an object of ids by token") from None
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(
            f"--vocab-file {path} contains {_described(vocab)}; it must be a vocab.json, an object "
            "of token ids by token"
        )
    token_of_id: dict[int, str] = {}
    for token, i in vocab.items():
        try:
            token.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"--vocab-file {path}: token {token[:60]!a} has half of a character"
            ) from None
        if type(i) is not int or i < 0:
            raise ValueError(
                f"--vocab-file {path}: token {token!r} has the id {i!r}; ids are integers from 0 on"
            )
        if token_of_id.setdefault(i, token) != token:
            raise ValueError(
                f"--vocab-file {path}: tokens {token_of_id[i]!r} and {token!r} share the id {i}"
            )
    check_size_of_ids(max(vocab.values()), len(vocab), f"--vocab-file {path}")
    return vocab


def read_merges(path: str, vocab: Vocabulary, vocab_path: str) -> Merges:
    """Read the merges.txt of --merge-file into pairs of tokens, in merge order. Raises
    FileNotFoundError, or ValueError if a line is not two tokens of the vocabulary whose
    concatenation is a token too."""
    merges = []
    for number, line in enumerate(read_text(path, "--merge-file").split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise ValueError(
                f"--merge-file {path}, line {number}: {line[:60]!r} is not two tokens with a space "
                "between; it must be a merges.txt"
            )
        left, right = pair
        for token in (left, right, left + right):
            if token not in vocab:
                raise ValueError(
                    f"--merge-file {path}, line {number}: {line!r} makes or uses the token "
                    f"{token!r}, which --vocab-file {vocab_path} lacks: the two files do not "
                    "belong together"
                )
        merges.append((left, right))
    return merges


def write_vocabulary(directory: Path, vocab: Vocabulary, merges: Merges) -> None:
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    write_text(directory / "merges.txt", "\n".join(lines) + "\n")
    write_text(directory / "vocab.json", json.dumps(vocab, ensure_ascii=False) + "\n")


def _described(value: object) -> str:
    if isinstance(value, dict | list | str):
        return f"an empty {type(value).__name__}" if not value else f"a {type(value).__name__}"
    return repr(value)


class RankedEncoding:
    """Encoder that runs tiktoken and maps its ranks to the vocabulary's ids."""

    def __init__(self, vocab: Vocabulary, merges: Merges, special: str | None) -> None:
        """Build the encoder for a vocabulary that passes `is_exact`, and for a token `special`."""
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
        """Return a text's token ids. Raises ValueError for a lone surrogate, or for about a million
        consecutive white-space characters, which exceed a limit of the regex engine."""
        ranks = self._encoding.encode_to_numpy(
            text, allowed_special=self._specials, disallowed_special=()
        )
        return self.id_of_rank[ranks]


def is_exact(vocab: Vocabulary, merges: Merges, definition: models.BPE) -> bool:
    """Return whether conditions 1 to 4 above hold, so that `RankedEncoding` equals `definition`."""
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


def _batch_encoder() -> Any:
    """Return the encoder of `--bpe-library fastokens`. Raises ConfigError if no feature has it."""
    for feature in features().values():
        encoder = feature.batch_encoder()
        if encoder is not None:
            return encoder
    raise ConfigError("--bpe-library fastokens is not supported here: leave the flag out")


class GPT2BPETokenizer(Tokenizer):
    """Tokenizer with the same ids as `transformers.GPT2Tokenizer`. As in transformers,
    `<|endoftext|>` in a text is the end-of-document token, whereas Megatron encodes it as ordinary
    tokens. If the vocabulary has no such token, it is ordinary text, and `eod` does not exist."""

    joins_bytes = True

    def __init__(
        self,
        vocab: Vocabulary,
        merges: Merges,
        source: str = "the vocabulary",
        with_fastokens: bool = False,
    ) -> None:
        """Build the tokenizer. `source` is the vocabulary's name in messages. `with_fastokens`
        encodes batches with fastokens. Raises ConfigError if it is not installed."""
        end = vocab.get(END_OF_TEXT)
        ids = SpecialIds(bos=end, eos=end, eod=end)
        super().__init__(source, max(vocab.values()) + 1, ids, hint=f" ({END_OF_TEXT})")
        self._vocab, self._merges = vocab, merges
        self._batch_encoder = _batch_encoder() if with_fastokens else None
        self._special_text = None if end is None else END_OF_TEXT
        self._definition = _definition(vocab, merges, self._special_text)

    # Built on first use. A training run needs only the size of the vocabulary.

    @cached_property
    def _ranked(self) -> RankedEncoding | None:
        if is_exact(self._vocab, self._merges, self._definition.model):
            return RankedEncoding(self._vocab, self._merges, self._special_text)
        return None

    @cached_property
    def _batches(self) -> Any:
        if self._ranked is None or self._batch_encoder is None:
            return None
        tokens = [*CHARACTER_OF_BYTE, *map("".join, self._merges)]
        id_of_rank = self._ranked.id_of_rank
        return self._batch_encoder(tokens, self._merges, self._special_text, id_of_rank)

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        return {i: token_bytes(token) for token, i in self._vocab.items()}

    @classmethod
    def from_files(
        cls, vocab_file: str | Path, merge_file: str | Path, with_fastokens: bool = False
    ) -> GPT2BPETokenizer:
        """Read vocab.json and merges.txt. Raises FileNotFoundError if a file is missing, or
        ValueError if a file is malformed or the two do not belong together."""
        vocab = read_vocabulary(str(vocab_file))
        merges = read_merges(str(merge_file), vocab, str(vocab_file))
        return cls(vocab, merges, f"--vocab-file {vocab_file}", with_fastokens)

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> GPT2BPETokenizer:
        refuse_extra_ids(config)
        return cls.from_files(
            required(config, "vocab_file", "the path of vocab.json"),
            required(config, "merge_file", "the path of merges.txt"),
            config.bpe_library == "fastokens",
        )

    def sample_ids(self, texts: Sequence[str]) -> list[TokenIds]:
        encodings = self._definition.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encodings]

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        if self._batches is None:
            return super().tokenize_batch(texts)
        return self._batches.encode(texts, self._encode)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including `<|endoftext|>`."""
        try:
            pieces = [self._bytes_of_id[i] for i in ids]
        except KeyError as error:
            raise ValueError(
                f"token id {error.args[0]} is not in {self.source} of {len(self._vocab)} tokens"
            ) from None
        return b"".join(pieces).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | Path) -> None:
        directory = Path(directory)
        write_vocabulary(directory, self._vocab, self._merges)
        write_pretrained(
            directory,
            self._definition,
            tokenizer_class="GPT2Tokenizer",
            add_prefix_space=False,
            errors="replace",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), self._special_text),
        )

    def _find_word_starts(self) -> WordStarts:
        marks = np.zeros(self._vocab_size, np.bool_)
        for i, token in self._bytes_of_id.items():
            marks[i] = starts_with_space(token)
        if END_OF_TEXT in self._vocab:
            marks[self._vocab[END_OF_TEXT]] = True
        return marks

    def _find_token_bytes(self) -> list[bytes]:
        return [self._bytes_of_id.get(i, b"") for i in range(self._vocab_size)]

    def _encode(self, text: str) -> TokenIds:
        if self._ranked is not None:
            try:
                return self._ranked.encode(text)
            except UnicodeEncodeError:
                raise
            except ValueError:  # too many consecutive white-space characters for tiktoken
                pass
        text.encode()  # raise a clear ValueError for a lone surrogate, not a TypeError
        return np.array(self._definition.encode(text).ids, np.int32)


def _definition(vocab: Vocabulary, merges: Merges, special: str | None) -> tokenizers.Tokenizer:
    """Return GPT-2's encoding as transformers defines it. Slower, but exact for any vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special is not None:
        tokenizer.add_special_tokens([AddedToken(special, normalized=False, special=True)])
    return tokenizer


TYPE = TokenizerType(GPT2BPETokenizer.from_config)
