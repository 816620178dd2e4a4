"""Checks of a tokenizer.json, which the tokenizers library trusts: it allocates an array up to the
largest id, and each normalization step may lengthen the text without limit."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from megatron.tokenizer.base import check_size_of_ids
from megatron.util.errors import rust_errors

LONGEST_CONTENT = 1 << 10
"""Maximum number of characters that a step may insert at once, and of tokens that may be added
around a text."""
_HARMLESS_GROWTH = 64
"""Maximum factor by which normalization may lengthen texts without a check of each text."""
_MOST_ADDED = 1 << 17
"""Maximum number of tokens added to a vocabulary. `transformers` compares each one with all earlier
ones, which takes quadratic time."""
_BYTES = 1 << 30
_PROBE, _PROBE_SECONDS = 8000, 0.15
"""Length of the texts on which a pattern is tested, and the time limit in seconds, which is fifty
times what ordinary patterns need."""
Step = Mapping[str, Any]
_PARTS = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder "
    "model".split()
)
_OF_MODEL = frozenset(
    "type vocab merges dropout unk_token unk_id continuing_subword_prefix end_of_word_suffix "
    "fuse_unk byte_fallback ignore_merges max_input_chars_per_word".split()
)
"""Known keys of the file and of its model section."""


def _bound(size: int, most: int, what: str) -> None:
    """Raise ValueError if a size exceeds its limit. ``what`` describes the size in the message."""
    if size > most:
        raise ValueError(f"{what}; at most {most:,} are accepted")


def check_pieces(pieces: Iterable[str | bytes], where: str) -> None:
    """Raise ValueError if a piece of a SentencePiece or Unigram model is too long. One library
    takes time that is quadratic in the length, and another crashes when it frees one nested map per
    byte."""
    longest = max(map(len, pieces), default=0)
    _bound(longest, LONGEST_CONTENT, f"{where} has a piece of {longest:,} characters")


def check_number_added(count: int, where: str) -> None:
    """Raise ValueError if adding ``count`` tokens to a vocabulary would take hours."""
    _bound(count, _MOST_ADDED, f"{where} adds {count:,} tokens to the vocabulary")


def check_tokenizer_json(path: Path, where: str) -> None:
    """Raise ValueError if a tokenizer.json exceeds a limit. ``where`` names the file in
    messages."""
    size = path.stat().st_size
    if size > _BYTES:
        raise ValueError(f"{where} has {size:,} bytes; a tokenizer.json has at most {_BYTES:,}")
    # orjson is several times as fast as Python's parser, and limits the nesting depth to 1,024
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    for part, known in ((content, _PARTS), (model, _OF_MODEL)):
        unknown = sorted(part.keys() - known) if isinstance(part, dict) else []
        if unknown:
            raise ValueError(
                f"{where} has the key {unknown[0]!r:.80}, which is not known here: the library "
                "makes nothing of it; if no id depends on it, remove it"
            )
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ValueError(f'{where} is not a tokenizer.json: it has no "model" with a "vocab"')
    try:
        _check(content, model, where)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where} is not a tokenizer.json: {type(error).__name__}: {error}"
        ) from None


def _check(content: Step, model: Step, where: str) -> None:
    vocab = model["vocab"]
    added = content.get("added_tokens") or []
    check_number_added(len(added), where)
    ids = [token["id"] for token in added]
    ids += vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
    check_size_of_ids(max(ids, default=0), len(vocab) + len(added), where)
    if isinstance(vocab, list):
        check_pieces((row[0] for row in vocab), where)
    longest = model.get("max_input_chars_per_word", 0)
    if longest > LONGEST_CONTENT:
        raise ValueError(
            f"{where} has max_input_chars_per_word {longest:,}; the time of a word grows with its "
            f"square, and at most {LONGEST_CONTENT:,} are accepted"
        )
    for name in ("normalizer", "decoder"):
        for step in _steps(content.get(name)):
            _check_step(step, f"{where}: its {name}")
    for name in ("normalizer", "pre_tokenizer"):
        for step in _steps(content.get(name)):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                _check_pattern(pattern["Regex"], f"{where}: its {name}")
    if _growth(content.get("decoder")) > _HARMLESS_GROWTH:
        raise ValueError(
            f"{where}: its decoder may make a text more than {_HARMLESS_GROWTH} times as long"
        )
    for step in _steps(content.get("post_processor")):
        for name in ("single", "pair"):
            if isinstance(step.get(name), list):
                puts = f"its post_processor puts {len(step[name]):,} tokens around a text"
                _bound(len(step[name]), LONGEST_CONTENT, f"{where}: {puts}")
        named = step.get("special_tokens")
        for token in named.values() if isinstance(named, dict) else ():
            for i in token["ids"]:
                if i > max(ids):
                    raise ValueError(
                        f"{where}: its post_processor has the token id {i:,}, and the vocabulary "
                        f"ends at {max(ids):,}"
                    )


def _check_step(step: Step, where: str) -> None:
    for name in ("content", "prepend"):
        length = len(step.get(name) or "")
        puts = f"puts {length:,} characters into a text at once ({step.get('type')})"
        _bound(length, LONGEST_CONTENT, f"{where} {puts}")
    if step.get("type") == "Precompiled":
        _check_charsmap(step.get("precompiled_charsmap") or "", where)


def _check_charsmap(encoded: str, where: str) -> None:
    """Raise ValueError if a base64-encoded SentencePiece replacement table is malformed. It has the
    size of a trie in bytes, the trie, and null-terminated replacements. The library trusts that
    size."""
    try:
        table = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError(f"{where} has a precompiled_charsmap that is not base64") from None
    check_charsmap(table, where)


def check_charsmap(table: bytes, where: str) -> None:
    """Raise ValueError if a replacement table is truncated, or if a replacement is too long."""
    trie = struct.unpack_from("<I", table)[0] if len(table) >= 4 else len(table)
    if table and (trie % 4 or not 0 < trie <= len(table) - 4):
        raise ValueError(f"{where} has a precompiled_charsmap that is damaged or cut short")
    longest = max(map(len, table[4 + trie :].split(b"\0")), default=0)
    puts = f"puts {longest:,} bytes in the place of a character"
    _bound(longest, LONGEST_CONTENT, f"{where} has a precompiled_charsmap that {puts}")


def _check_pattern(pattern: str, where: str) -> None:
    """Raise ValueError if a regular expression takes at least quadratic time on a run of some
    character: a line of a megabyte would take hours."""
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    # Append the pattern's other characters: if one that must follow a run is absent, the library
    # may skip the run.
    others = "".join(c for c in dict.fromkeys(pattern) if not c.isalnum())
    letters = [c for c in dict.fromkeys(pattern) if c.isalnum()][:12]
    for unit in dict.fromkeys((*letters, "".join(letters), *" .\n", "a", "A", "1", "\u6771")):
        text = (unit * _PROBE)[:_PROBE] + "\0" + others
        if _is_slow(splitter, text, where):
            raise ValueError(
                f"{where} has a pattern that takes too long on a run of {unit[:20]!r}: "
                f"{pattern[:100]!r}; replace it by one that is linear"
            )


def _is_slow(splitter: pre_tokenizers.PreTokenizer, text: str, where: str) -> bool:
    """Return whether splitting a text exceeds the time limit in every one of a few attempts, since
    a busy machine may delay some."""
    for _ in range(3):
        start = time.thread_time()
        try:
            with rust_errors(where):
                splitter.pre_tokenize_str(text)
        except ValueError:  # the library gave up matching
            return True
        if time.thread_time() - start <= _PROBE_SECONDS:
            return False
    return True


def _steps(step: Step | None) -> Iterator[Step]:
    """Yield a step or, if it is a sequence, its members in order."""
    if step is None:
        return
    names = ("normalizers", "decoders", "processors", "pretokenizers")
    inner = next((step[name] for name in names if name in step), None)
    if inner is None:
        yield step
    for each in inner or ():
        yield from _steps(each)


def _growth(steps: Step | None) -> float:
    """Return an upper bound on the factor by which successive replacements lengthen a text."""
    growth = 1.0
    for step in _steps(steps):
        if step.get("type") == "Replace":
            literal = step["pattern"].get("String")
            shortest = len(literal) if literal else 1
            growth *= max(1.0, len(step["content"]) / shortest + (literal is None))
    return growth


class WatchedNormalizer:
    """Check to run before a text is normalized, which raises an error if the result would be too
    long. The library itself would end the process, because it cannot report a lack of memory."""

    MOST_TIMES, MOST_MORE = 64, 1 << 20

    def __init__(self, description: Step, source: str) -> None:
        """Create a check. `description` is a tokenizer.json's normalizer; `source` is the
        tokenizer's name in messages."""
        self._source = source
        self._steps = [(step, _normalizer(step)) for step in _steps(description)]

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, source: str) -> WatchedNormalizer | None:
        """Return the check for a tokenizer, or None if its normalizer cannot lengthen texts too
        much."""
        normalizer = tokenizer.normalizer
        if normalizer is None:
            return None
        description = json.loads(normalizer.__getstate__())
        return cls(description, source) if _growth(description) > _HARMLESS_GROWTH else None

    def check(self, text: str) -> None:
        """Raise ValueError if any step could make the text too long."""
        most = self.MOST_TIMES * len(text) + self.MOST_MORE
        for step, normalizer in self._steps:
            if normalizer is None:  # steps of this kind only replace single characters
                continue
            if step["type"] == "Replace":
                literal = step["pattern"].get("String")
                places = text.count(literal) if literal else len(text) + 1
                if len(text) + places * len(step["content"]) > most:
                    raise ValueError(
                        f"{self._source}: its normalizer would make a text of {len(text):,} "
                        f"characters more than {self.MOST_TIMES} times as long"
                    )
            text = normalizer.normalize_str(text)


def _normalizer(step: Step) -> Any:
    if step["type"] == "Replace":
        literal = step["pattern"].get("String")
        pattern = literal if literal is not None else Regex(step["pattern"]["Regex"])
        return normalizers.Replace(pattern, step["content"])
    if step["type"] == "Prepend":
        return normalizers.Prepend(step["prepend"])
    if step["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents"):
        return getattr(normalizers, step["type"])()
    return None
