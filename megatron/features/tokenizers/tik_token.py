"""Byte-pair encodings computed by tiktoken, from Llama 3's ranks or Megatron's JSON vocabulary."""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.flags import TikTokenFlags
from megatron.features.tokenizers.pieces import sentinel_ids
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    read_text,
    refuse_extra_ids,
    required,
    write_pretrained,
)
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE, starts_with_space
from megatron.util.json_text import parse_json

Ranks = dict[bytes, int]

# Patterns that split a text before encoding: Llama 3's, and Megatron's v1 and v2. They match the
# same substrings as the originals, but all alternatives without look-ahead are in one group, which
# the regex engine compiles to an automaton instead of backtracking. After `\s+(?!\S)`, which
# matches
# all white space except the last character, `\s` matches as much as `\s+`.
_LLAMA3_SPLIT = (
    r"(?:(?i:'(?:[sdmt]|ll|ve|re))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_JSON_SPLITS = {
    "v1": (
        r"(?:[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n])"
        r"|\s+(?!\S)|\s"
    ),
    "v2": (
        rf"(?:[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+)|\s+(?!\S)|\s"
    ),
}
_NONE: set[str] = set()
_JSON_LIMIT = 2**17
_LONGEST_TOKEN = 1 << 10
"""Maximum length of a token in bytes. The time for merging a token grows quadratically."""
_JSON_SPECIALS = ("<unk>", "<s>", "</s>")


class TikTokenizer(Tokenizer):
    """Tokenizer with the ids of `tiktoken.Encoding` for the same ranks."""

    joins_bytes = True

    def __init__(
        self,
        ranks: Ranks,
        split: str,
        specials: Mapping[str, int],
        ids: SpecialIds,
        specials_in_text: bool,
        source: str = "the vocabulary",
    ) -> None:
        """Build the tokenizer. `ranks` maps tokens to ids, and `split` is a regular expression
        whose matches are encoded separately. With `specials_in_text`, a special token's name in a
        text becomes that token."""
        super().__init__(source, 1 + max([*ranks.values(), *specials.values()]), ids)
        self._ranks, self._split, self._specials = ranks, split, dict(specials)
        self._allowed = set(specials) if specials_in_text else set()
        self._encoding = tiktoken.Encoding(
            source, pat_str=split, mergeable_ranks=ranks, special_tokens=self._specials
        )
        assert all(name.startswith("<") for name in self._allowed)

    @classmethod
    def llama3_from_file(cls, path: str | Path) -> TikTokenizer:
        """Return the tokenizer for Llama 3's tokenizer.model. Each line has a token in base64 and
        its rank; 256 special tokens follow these ids. `<|end_of_text|>` ends a document. Raises
        FileNotFoundError if the file is missing, and ValueError if it is malformed."""
        ranks = read_ranks(str(path))
        specials = {name: len(ranks) + n for n, name in enumerate(_llama3_specials())}
        end = specials["<|end_of_text|>"]
        ids = SpecialIds(bos=specials["<|begin_of_text|>"], eos=end, eod=end)
        return cls(ranks, _LLAMA3_SPLIT, specials, ids, True, f"--tokenizer-model {path}")

    @classmethod
    def json_from_file(
        cls,
        path: str | Path,
        pattern: str,
        special_tokens: Sequence[str] = _JSON_SPECIALS,
        num_special_tokens: int = 1000,
        vocab_size: int | None = None,
    ) -> TikTokenizer:
        """Return the tokenizer for Megatron's JSON vocabulary, a list of objects with the keys
        rank, token_bytes (base64) and token_str.

        Special tokens have the lowest ids: first `special_tokens`, then `<SPECIAL_N>`. In a text,
        their names are ordinary text. `</s>` ends a document. `pattern` is "v1" or "v2".
        `vocab_size` includes special tokens; by default all tokens are used, but at most 131,072.
        Raises FileNotFoundError if the file is missing, and ValueError if it is malformed or too
        small.
        """
        names = _json_specials(special_tokens, num_special_tokens)
        tokens = read_json_ranks(str(path))
        size = vocab_size or min(_JSON_LIMIT, len(tokens) + len(names))
        if not len(names) + 256 <= size <= len(tokens) + len(names):
            raise ConfigError(
                f"--vocab-size {size} does not fit --tokenizer-model {path} of {len(tokens)} "
                f"tokens: with {len(names)} special ones it must be {len(names) + 256} to "
                f"{len(tokens) + len(names)}"
            )
        ranks = {t: len(names) + n for n, t in enumerate(tokens[: size - len(names)])}
        specials = {name: n for n, name in enumerate(names)}
        keys = {"bos": "<s>", "eos": "</s>", "eod": "</s>", "mask": "<mask>", "pad": "<pad>"}
        keys |= {"cls": "<cls>", "sep": "<sep>"}
        given = {key: specials[name] for key, name in keys.items() if name in specials}
        ids = SpecialIds(**given, sentinels=sentinel_ids(specials))
        return cls(ranks, _JSON_SPLITS[pattern], specials, ids, False, f"--tokenizer-model {path}")

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> TikTokenizer:
        """Return the tokenizer for --tokenizer-model. The --tiktoken-* flags apply only to JSON."""
        refuse_extra_ids(config)
        path = required(
            config, "tokenizer_model", "Llama 3's file of ranks, or Megatron's JSON vocabulary"
        )
        if not is_json(path):
            return cls.llama3_from_file(path)
        flags = TikTokenFlags.of(config)
        if flags.tiktoken_pattern is None:
            raise ConfigError(
                f"--tiktoken-pattern is missing: --tokenizer-model {path} is a JSON vocabulary, "
                "whose text is split by v1 or v2, as it was when it was trained"
            )
        return cls.json_from_file(
            path,
            flags.tiktoken_pattern,
            flags.tiktoken_special_tokens,
            flags.tiktoken_num_special_tokens,
            config.vocab_size,
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return self._encoding.decode([int(i) for i in ids])

    def save_pretrained(self, directory: str | Path) -> None:
        token = {i: name for name, i in self._specials.items()}
        write_pretrained(
            directory,
            self._definition,
            tokenizer_class="PreTrainedTokenizerFast",
            clean_up_tokenization_spaces=False,
            split_special_tokens=not self._allowed,
            **self.special_ids.tokens(token),
        )

    def _find_word_starts(self) -> WordStarts:
        marks = np.ones(self._vocab_size, np.bool_)
        for token, i in self._ranks.items():
            marks[i] = starts_with_space(token)
        return marks

    def _find_special_tokens(self) -> frozenset[int]:
        return frozenset(self._specials.values())

    def _find_token_bytes(self) -> list[bytes]:
        tokens = {i: token for token, i in self._ranks.items()}
        tokens |= {i: name.encode() for name, i in self._specials.items()}
        return [tokens.get(i, b"") for i in range(self._vocab_size)]

    def _encode(self, text: str) -> TokenIds:
        allowed = self._allowed if "<" in text else _NONE  # every special token begins with <
        try:
            ids = self._encoding.encode_to_numpy(
                text, allowed_special=allowed, disallowed_special=()
            )
        except UnicodeEncodeError:
            raise
        except ValueError:  # a run of white space was too long for the regex engine
            text.encode()
            ids = np.array(self._definition.encode(text).ids)
        return ids.astype(np.int32)

    @functools.cached_property
    def _definition(self) -> tokenizers.Tokenizer:
        def characters(token: bytes) -> str:
            return "".join(CHARACTER_OF_BYTE[byte] for byte in token)

        vocab = {characters(token): i for token, i in self._ranks.items()} | self._specials
        merges = []
        for token in sorted(self._ranks, key=self._ranks.__getitem__):
            cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
            possible = [(a, b) for a, b in cuts if a in self._ranks and b in self._ranks]
            possible.sort(key=lambda pair: (self._ranks[pair[0]], self._ranks[pair[1]]))
            merges += [(characters(a), characters(b)) for a, b in possible]
        definition = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        definition.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(self._split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        definition.decoder = decoders.ByteLevel()
        definition.add_special_tokens(
            [AddedToken(name, normalized=False, special=True) for name in self._specials]
        )
        definition.encode_special_tokens = not self._allowed
        return definition


def _llama3_specials() -> list[str]:
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(251)]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *reserved[:4]]
    names += ["<|start_header_id|>", "<|end_header_id|>", reserved[4], "<|eot_id|>"]
    return names + reserved[5:]


def _json_specials(given: Sequence[str], number: int) -> list[str]:
    missing = [name for name in _JSON_SPECIALS if name not in given]
    if missing or len(set(given)) < len(given) or len(given) > number:
        raise ConfigError(
            f"--tiktoken-special-tokens {' '.join(given)}: these must be different names, at most "
            f"--tiktoken-num-special-tokens {number} of them, and {', '.join(_JSON_SPECIALS)} "
            "among them"
        )
    return [*given, *(f"<SPECIAL_{n}>" for n in range(len(given), number))]


def is_json(path: str) -> bool:
    """Return whether --tokenizer-model is a JSON file. Raises FileNotFoundError if it is missing,
    and ValueError if it is not UTF-8."""
    return read_text(path, "--tokenizer-model").lstrip()[:1] in ("[", "{")


def read_ranks(path: str) -> Ranks:
    """Read a file whose lines have a token in base64, a space and the token's rank. Ranks count
    from 0. Raises FileNotFoundError if the file is missing, and ValueError if a line is malformed
    or one of the 256 bytes has no token."""
    ranks: Ranks = {}
    for number, line in enumerate(read_text(path, "--tokenizer-model").splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(" ")
        decoded = _decoded(token)
        if decoded is None or rank != str(len(ranks)) or decoded in ranks:
            raise ValueError(
                f"--tokenizer-model {path}, line {number}: {line[:60]!r} is not a new token in "
                f"base64, a space and the rank {len(ranks)}; it must be a tiktoken file of ranks, "
                "such as Llama 3's tokenizer.model"
            )
        ranks[decoded] = len(ranks)
    _check_bytes(path, ranks)
    return ranks


def read_json_ranks(path: str) -> list[bytes]:
    """Read a JSON list of objects with `rank`, which counts from 0, and `token_bytes` (base64).
    Raises FileNotFoundError if the file is missing, and ValueError if it is malformed or one of the
    256 bytes has no token."""
    where = f"--tokenizer-model {path}"
    entries = parse_json(read_text(path, "--tokenizer-model"), where, lenient=True)
    if not isinstance(entries, list):
        raise ValueError(f"--tokenizer-model {path} is not a list of tokens")
    ranks: Ranks = {}
    for number, entry in enumerate(entries):
        decoded = _decoded(entry.get("token_bytes")) if isinstance(entry, dict) else None
        if decoded is None or entry.get("rank") != number or decoded in ranks:
            raise ValueError(
                f"--tokenizer-model {path}, entry {number}: {str(entry)[:80]} is not an object "
                f"with rank {number} and, as token_bytes, a new token in base64"
            )
        ranks[decoded] = number
    _check_bytes(path, ranks)
    return list(ranks)


def _decoded(token: object) -> bytes | None:
    try:
        return base64.b64decode(token, validate=True) or None if isinstance(token, str) else None
    except (binascii.Error, ValueError):
        return None


def _check_bytes(path: str, ranks: Ranks) -> None:
    longest = max(map(len, ranks), default=0)
    if longest > _LONGEST_TOKEN:
        raise ValueError(
            f"--tokenizer-model {path} has a token of {longest:,} bytes; at most "
            f"{_LONGEST_TOKEN:,} are accepted"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"--tokenizer-model {path} lacks {len(missing)} of the 256 bytes, first "
            f"0x{missing[0]:02X}: not every text could be encoded"
        )
