"""Loads the tokenizer of `transformers` that a folder contains, whoever wrote the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.tokenizer.base import read_vocabulary_file
from megatron.tokenizer.sentence_piece_model import check_sizes
from megatron.tokenizer.tokenizer_json import (
    check_number_added,
    check_size_of_ids,
    check_tokenizer_json,
)
from megatron.util.errors import rust_errors
from megatron.util.json_text import parse_json

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_OTHERS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "chat_template.jinja", "merges.txt", "vocab.txt", "tekken.json",
)  # fmt: skip


def load_folder(folder: Path, flag: str = "--tokenizer-model") -> Any:
    """The tokenizer that `AutoTokenizer` makes of a folder: of its files alone, without the
    network, and without running code in it or asking whether it may.

    Raises:
        ValueError: it is not a tokenizer that `transformers` can read, or one of its files has ids
            or steps out of bounds; names ``flag``, the folder and what it contains.
    """
    from transformers import AutoTokenizer  # seconds: only for whoever needs it

    _check_files(folder, flag)
    try:
        with rust_errors("the library cannot read it"):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        vocab = tokenizer.get_vocab()
        _ = tokenizer.all_special_ids  # fails where a special token is not in the vocabulary
        check_size_of_ids(max(vocab.values(), default=0), len(vocab), "its vocabulary")
    except Exception as error:  # transformers raises many kinds, some of them bare Exception
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        reason = " ".join(str(error).split())[:500]
        if "trust_remote_code" in reason:
            reason = "it needs Python code of its own, which is never run; convert it to the files "
            reason += "of a tokenizer that transformers has, where its code can be trusted"
        raise ValueError(
            f"{flag} {folder} is not a tokenizer that transformers can read "
            f"(the folder contains {names}): {reason}"
        ) from error
    return tokenizer


def _check_files(folder: Path, flag: str) -> None:
    """Raises ValueError if a file that `transformers` reads is out of bounds."""
    for name in _OTHERS:
        if (folder / name).is_file():
            read_vocabulary_file(folder / name, flag)
    for name in _SETTINGS:
        if (folder / name).is_file():
            content = read_vocabulary_file(folder / name, flag)
            _check_settings(name, content, f"{flag} {folder / name}")
    for path in (folder / "tokenizer.json", *sorted(folder.glob("tokenizer.*.json"))):
        if path.is_file():
            check_tokenizer_json(path, f"{flag} {path}")
    for path in sorted(folder.glob("*.model")):
        if path.is_file():
            check_sizes(read_vocabulary_file(path, flag), f"{flag} {path}")


def _check_settings(name: str, text: bytes, where: str) -> None:
    content = parse_json(text, where, lenient=True)
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a JSON object")
    if name != _SETTINGS[0]:
        ids = [i for i in content.values() if type(i) is int]
        check_size_of_ids(max(ids, default=0), len(ids), where)
    if name != "vocab.json":
        lists = [each for each in content.values() if isinstance(each, list | dict)]
        check_number_added(sum(map(len, lists)), where)
    # Which file of a tokenizer is read may depend on the version of the library.
    others = content.get("fast_tokenizer_files") or []
    for other in others if isinstance(others, list | dict) else [others]:
        if not isinstance(other, str) or Path(other).name != other:
            raise ValueError(f"{where} names the file {other!r:.80}, which is not in its folder")
