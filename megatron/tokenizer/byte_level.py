"""The two files of a byte-level byte-pair encoding in GPT-2's form, vocab.json and merges.txt.

Tokens are byte strings, written with one printable character per byte: the 188 bytes that are
printable in Latin-1 stand for themselves, the 68 others for U+0100, U+0101, ... in byte order.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron.tokenizer.files import read_text, write_text

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTER_OF_BYTE = _byte_alphabet()
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}


def token_bytes(token: str) -> bytes:
    """The bytes a token stands for; a token that is not in the byte alphabet is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def starts_with_space(token: bytes) -> bool:
    """Whether a token begins with a space, or other ASCII white space: it begins a word."""
    return token[:1].isspace()


def read_vocabulary(path: str) -> Vocabulary:
    """Reads the vocab.json of --vocab-file: ids by token.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, not an object of integers, or two tokens share an id.
    """
    try:
        vocab = json.loads(read_text(path, "--vocab-file"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--vocab-file {path} is not JSON ({error}); it must be a vocab.json, an object of "
            "token ids by token"
        ) from None
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(
            f"--vocab-file {path} holds {_described(vocab)}; it must be a vocab.json, an object of "
            "token ids by token"
        )
    token_of_id: dict[int, str] = {}
    for token, i in vocab.items():
        if type(i) is not int or i < 0:
            raise ValueError(
                f"--vocab-file {path}: token {token!r} has the id {i!r}; ids are integers from 0 on"
            )
        if token_of_id.setdefault(i, token) != token:
            raise ValueError(
                f"--vocab-file {path}: tokens {token_of_id[i]!r} and {token!r} share the id {i}"
            )
    return vocab


def read_merges(path: str, vocab: Vocabulary, vocab_path: str) -> Merges:
    """Reads the merges.txt of --merge-file: pairs of tokens, the earlier the sooner merged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not two tokens, or the vocabulary lacks one of them or their merge.
    """
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
    """Writes `directory`/vocab.json and `directory`/merges.txt."""
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    write_text(directory / "merges.txt", "\n".join(lines) + "\n")
    write_text(directory / "vocab.json", json.dumps(vocab, ensure_ascii=False) + "\n")


def _described(value: object) -> str:
    if isinstance(value, dict | list | str):
        return f"an empty {type(value).__name__}" if not value else f"a {type(value).__name__}"
    return repr(value)
