"""Tokenizer and vocabulary of an old Megatron checkpoint, from the arguments in its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.config import TokenizerConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.registry import TOKENIZERS

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
"""Sizes of the vocabularies that Megatron's tokenizers always have."""

_PUBLISHED = {50304: 50257, 30592: 30522, 29056: 28996}
"""Rows and tokens of the embeddings of NVIDIA's published models, which have no arguments: GPT-2,
and BERT without and with case, padded to multiples of 128."""


def tokenizer_of_arguments(arguments: Mapping[str, Any]) -> TokenizerConfig | None:
    """The tokenizer and its files; None where the arguments do not name them."""
    kind = arguments.get("tokenizer_type")
    if not isinstance(kind, str):
        return None
    files = {
        name: arguments[name]
        for name in (
            "vocab_file", "merge_file", "tokenizer_model", "tokenizer_model_type",
            "tiktoken_pattern",
        )
        if isinstance(arguments.get(name), str)
    }  # fmt: skip
    if kind == "PretrainedFromHF":
        kind, folder = "HFTokenizer", arguments.get("tokenizer_name_or_path")
        files["tokenizer_model"] = folder if isinstance(folder, str) else None
    size = arguments.get("vocab_size")
    extra = arguments.get("vocab_extra_ids")
    return TokenizerConfig(
        tokenizer_type=kind,
        vocab_size=size if kind == "NullTokenizer" and isinstance(size, int) else None,
        vocab_extra_ids=extra if isinstance(extra, int) else 0,
        **files,
    )


def unpadded_vocabulary(arguments: Mapping[str, Any], rows: int) -> int | None:
    """Number of rows of the token embedding that are tokens, the rest being padding; None when the
    checkpoint does not say. ``arguments`` are empty where it has none."""
    if not arguments:
        return _PUBLISHED.get(rows)
    known = arguments.get("unpadded_vocab_size")
    if known is None:
        kind, size = arguments.get("tokenizer_type"), arguments.get("vocab_size")
        extra = arguments.get("vocab_extra_ids") or 0
        if kind == "NullTokenizer" and isinstance(size, int):
            known = size + 1
        elif isinstance(kind, str) and kind in VOCABULARIES and isinstance(extra, int):
            # Before the extra ids WordPiece has [BOS] and [EOS], as ours.
            further = extra + 2 if extra and kind.startswith("BertWordPiece") else extra
            known = VOCABULARIES[kind] + further
            if not _pads(known, rows, arguments):
                known = None  # the user's own files
    return known if isinstance(known, int) and 0 < known <= rows else None


def end_of_text(arguments: Mapping[str, Any], size: int) -> int | None:
    """The token that ends a document, by the size of the vocabulary: the last one of GPT-2's."""
    gpt2 = "GPT2BPETokenizer"
    named = arguments.get("tokenizer_type", gpt2)
    return size - 1 if named == gpt2 and size == VOCABULARIES[gpt2] else None


def write_tokenizer(config: TokenizerConfig | None, target: Path, rows: int, name: str) -> bool:
    """Writes Hugging Face's files of a tokenizer to a new folder; returns whether its own files
    are on this machine. ``rows`` are those of the token embedding of the checkpoint ``name``.
    Raises CheckpointError if the files do not make a tokenizer, or one of more tokens."""
    if config is None or config.tokenizer_type not in TOKENIZERS:
        return False
    given = (config.vocab_file, config.merge_file, config.tokenizer_model)
    files = [Path(each) for each in given if each is not None]
    if not files or not all(path.exists() for path in files):
        return False
    names = ", ".join(map(str, files))
    try:
        made = build_tokenizer(config)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{names}: not the tokenizer of {name}: {error}") from None
    if made.vocab_size > rows:
        raise CheckpointError(
            f"{names}: {made.vocab_size:,} tokens, but the token embedding of {name} has {rows:,} "
            "rows; replace the files by those that it was trained with, or move them away"
        )
    target.mkdir()
    made.save_pretrained(target)
    return True


def _pads(size: int, rows: int, arguments: Mapping[str, Any]) -> bool:
    """Whether the run padded a vocabulary of ``size`` to ``rows``, as far as it says how."""
    multiple = arguments.get("make_vocab_size_divisible_by")
    ranks = arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size", 1))
    if not (isinstance(multiple, int) and isinstance(ranks, int) and multiple * ranks > 0):
        return True
    return rows == -(-size // (multiple * ranks)) * multiple * ranks
