"""Files of ranked tokens: tiktoken's lines and Megatron's JSON."""

from __future__ import annotations

import base64
import binascii
import json

from megatron.tokenizer.files import read_text

Ranks = dict[bytes, int]


def is_json(path: str) -> bool:
    """Whether --tokenizer-model holds JSON.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8.
    """
    return read_text(path, "--tokenizer-model").lstrip()[:1] in ("[", "{")


def read_ranks(path: str) -> Ranks:
    """Reads lines of a token in base64, a space and its rank, 0, 1, 2 and on.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not that, or one of the 256 bytes is missing.
    """
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
    """Reads a list of objects with `rank` (0, 1, 2 and on) and `token_bytes` (base64).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not that, or one of the 256 bytes is missing.
    """
    try:
        entries = json.loads(read_text(path, "--tokenizer-model"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--tokenizer-model {path} is not JSON: {error}") from None
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
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"--tokenizer-model {path} lacks {len(missing)} of the 256 bytes, the first of them "
            f"0x{missing[0]:02X}: not every text could be encoded"
        )
