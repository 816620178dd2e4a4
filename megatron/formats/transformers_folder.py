"""Safe loading of a `transformers` tokenizer from an untrusted folder."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.formats.tokenizer_json import (
    check_charsmap,
    check_number_added,
    check_pieces,
    check_tokenizer_json,
)
from megatron.tokenizer.base import check_size_of_ids, read_vocabulary_file
from megatron.util.errors import rust_errors
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_CHOSEN = (
    ("add_prefix_space", "add_prefix_space"), ("add_prefix_space", "prepend_scheme"),
    ("do_lower_case", "lowercase"), ("strip_accents", "strip_accents"),
    ("tokenize_chinese_chars", "handle_chinese_chars"), ("trim_offsets", "trim_offsets"),
)  # fmt: skip
"""Keys of tokenizer_config.json, each with the tokenizer.json field that tokenizer classes set from
it."""
_OF_MODEL = (
    "unk_token", "unk_id", "byte_fallback", "fuse_unk", "ignore_merges", "dropout",
    "continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word",
)  # fmt: skip
"""Model settings in `tokenizers` that affect ids."""
_TEXTS = (
    "It's 3 7 59 12345678 na\u00efve: def f(x):\n\treturn 1\n\n\n \u6771\u4eac  I'LL",
    " e\u0301",
    "a  b",
)
"""Texts that different tokenizers are likely to split differently, to compare ids."""
_KEYS = frozenset(
    word
    for line in Path(__file__).with_name("tokenizer_config_keys.txt").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
)
"""Accepted keys of tokenizer_config.json: those that `transformers` reads, and others that do not
affect ids."""
_KEY = re.compile(
    r"_.*|(image|video|audio|vision|unsloth)_.*|.*_(token|tokens|tokens?_ids?|template|parser_type)"
    r"|.*_(file|token_type_id|token_box|token_label)"
)
"""Pattern for further accepted keys, which name special tokens, templates and files."""
_OTHERS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "chat_template.jinja", "merges.txt", "vocab.txt", "tekken.json",
)  # fmt: skip


def load_folder(folder: Path, flag: str = "--tokenizer-model") -> Any:
    """Load the tokenizer that `AutoTokenizer` finds in a folder. Only local files are used, and
    code in the folder is never run.

    Raises:
        ValueError: the folder is not a tokenizer that `transformers` can read, or one of its files
            exceeds the limits on ids or steps. The message names ``flag``, the folder and its
            content.
    """
    from transformers import AutoTokenizer  # importing takes seconds

    _check_files(folder, flag)
    try:
        with rust_errors("the library cannot read it"):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        vocab = tokenizer.get_vocab()
        _ = tokenizer.all_special_ids  # raises an error if a special token is not in the vocabulary
        check_size_of_ids(max(vocab.values(), default=0), len(vocab), "its vocabulary")
    except Exception as error:  # transformers raises many kinds, including bare Exception
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


def load_as_written(folder: Path, flag: str = "--tokenizer-model") -> Any:
    """Load the tokenizer as :func:`load_folder` does, but with the steps of the folder's own
    tokenizer.json. For some model types and classes, `transformers` 5 reads only the vocabulary in
    that file and splits texts by the class's own rules, which can change ids, for example those of
    digits. A warning is logged if the ids differ."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_folder(folder, flag)
    plain = type(tokenizer) is PreTrainedTokenizerFast
    if plain or not tokenizer.is_fast or not (folder / "tokenizer.json").is_file():
        return tokenizer
    with rust_errors(f"{flag} {folder}"):
        written: Any = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    path = folder / _SETTINGS[0]
    settings = parse_json(path.read_bytes(), str(path), lenient=True) if path.is_file() else {}
    chosen = {field for key, field in _CHOSEN if settings.get(key) is not None}
    if _steps(written, chosen) == _steps(tokenizer, chosen):
        return tokenizer
    vocab = written.get_vocab()
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):  # a class may define its own
        name = f"{role}_token"
        if getattr(written, name) is None and getattr(tokenizer, name) in vocab:
            setattr(written, name, getattr(tokenizer, name))
    if is_main_process() and any(_ids(written, text) != _ids(tokenizer, text) for text in _TEXTS):
        logger.warning(
            "%s %s: ids are those of its tokenizer.json; AutoTokenizer of transformers makes a %s "
            "of it here, which gives other ids",
            flag, folder, type(tokenizer).__name__,
        )  # fmt: skip
    return written


def _steps(tokenizer: Any, chosen: Collection[str]) -> list[Any]:
    """Return everything that determines the ids of a text, except the fields ``chosen``, which
    tokenizer_config.json sets."""
    backend, model = tokenizer.backend_tokenizer, tokenizer.backend_tokenizer.model
    steps = (backend.normalizer, backend.pre_tokenizer)
    added = {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
    return [
        *(
            None if step is None else _without(json.loads(step.__getstate__()), chosen)
            for step in steps
        ),
        type(model),
        *(getattr(model, name, None) or None for name in _OF_MODEL),
        added,
        tokenizer.get_vocab(),
    ]


def _without(step: Any, fields: Collection[str]) -> Any:
    if isinstance(step, list):
        return [_without(each, fields) for each in step]
    if not isinstance(step, dict):
        return step
    return {name: _without(each, fields) for name, each in step.items() if name not in fields}


def _ids(tokenizer: Any, text: str) -> list[int] | str:
    try:
        ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the Rust library raises it for text that has no tokens
        return str(error)
    return ids


def _check_files(folder: Path, flag: str) -> None:
    """Raise ValueError if a file that `transformers` reads exceeds a limit."""
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
            _check_sentence_piece(read_vocabulary_file(path, flag), f"{flag} {path}")


def _check_sentence_piece(content: bytes, where: str) -> None:
    """Raise ValueError if a SentencePiece model, which another library will convert, has a piece or
    a replacement that is too long. Other content is ignored."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009
    try:
        model.ParseFromString(content)
    except DecodeError:
        return  # not a SentencePiece model
    check_charsmap(model.normalizer_spec.precompiled_charsmap, where)
    check_pieces((piece.piece for piece in model.pieces), where)


def _check_settings(name: str, text: bytes, where: str) -> None:
    content = parse_json(text, where, lenient=True)
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a JSON object")
    if name == _SETTINGS[0]:
        unknown = [key for key in content if key not in _KEYS and not _KEY.fullmatch(key)]
        if unknown:
            raise ValueError(
                f"{where} has the key {unknown[0]!r:.80}, which is not known here: transformers "
                "makes nothing of it; if no id depends on it, remove it"
            )
    if name != _SETTINGS[0]:
        ids = [i for i in content.values() if type(i) is int]
        check_size_of_ids(max(ids, default=0), len(ids), where)
    if name != "vocab.json":
        lists = [each for each in content.values() if isinstance(each, list | dict)]
        check_number_added(sum(map(len, lists)), where)
    # Depending on the library's version, one of several tokenizer files is read.
    others = content.get("fast_tokenizer_files") or []
    for other in others if isinstance(others, list | dict) else [others]:
        if not isinstance(other, str) or Path(other).name != other:
            raise ValueError(f"{where} names the file {other!r:.80}, which is not in its folder")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within this context, suppress the table of unexpected weights that loading a model prints;
    callers check these themselves. Progress bars appear only on a terminal."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
