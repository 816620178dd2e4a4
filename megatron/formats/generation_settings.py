"""Generation settings of a model, as in `transformers`' ``generation_config.json``. The most
important ones are the end-of-text tokens. A checkpoint stores that file next to its tokenizer's
files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.config import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.mark import mark_of

Generation = dict[str, Any]
"""Content of a ``generation_config.json``; empty if the file does not exist."""
FILE = "generation_config.json"
_ENDS = "eos_token_id"
OF_WRITER = ("transformers_version", "_from_model_config", "_name_or_path")
"""Keys about the program that wrote the file, not about the model."""
_INNER = ("decoder", "generator", "text_config")
"""Sections of config.json in which `transformers` searches for keys that the top level lacks."""


def read_generation(folder: Path, rows: int, model_type: str | None = None) -> Generation:
    """Read a folder's ``generation_config.json``. If it does not name the end-of-text tokens, or
    does not exist, those of config.json are added, as in `transformers`.

    Args:
        rows: number of tokens in the model's vocabulary.
        model_type: model type in the folder's config.json; None if it is not one of `transformers`.

    Raises:
        CheckpointError: a file is malformed, or an end-of-text token is not in the vocabulary.
    """
    path, content = folder / FILE, Generation()
    if path.is_file():
        content = _object(path)
    if content.get(_ENDS) is None and model_type is not None:
        path = folder / "config.json"
        known = _object(path)
        inner: Any = next((known[name] for name in _INNER if known.get(name)), {})
        ends = known.get(_ENDS)
        if ends is None and isinstance(inner, dict):
            ends = inner.get(_ENDS)
        content |= {} if ends is None else {_ENDS: ends}
    tokens = _tokens(content.get(_ENDS), path)
    outside = [token for token in tokens if not 0 <= token < rows]
    if outside and tokens != [_default_end(model_type)]:
        raise CheckpointError(
            f"{path}: {_ENDS} names {outside[0]}, which is not a token of the model, whose ids are "
            f"0 to {rows - 1}: correct it, or remove the key"
        )
    content.pop(_ENDS, None)
    kept = {name: value for name, value in content.items() if name not in OF_WRITER}
    return kept if outside else with_ends(kept, tokens)


def ends_of(generation: Generation) -> list[int]:
    """Return the tokens that end a text, or an empty list if the settings do not name them."""
    return _tokens(generation.get(_ENDS), Path(FILE))


def end_tokens(tokenizer: Tokenizer, generation: Generation) -> frozenset[int]:
    """Return the tokens that end a model's texts: those named in its settings, and its tokenizer's
    end-of-text or end-of-document tokens. The set may be empty."""
    return tokenizer.ends.union(ends_of(generation))


def with_ends(generation: Generation, ends: Iterable[int]) -> Generation:
    """Return the settings with ``ends`` as the end-of-text tokens, written as a single number or a
    list, as in `transformers`. If ``ends`` is empty, nothing changes."""
    tokens = list(dict.fromkeys(ends))
    if not tokens:
        return generation
    return generation | {_ENDS: tokens[0] if len(tokens) == 1 else tokens}


def for_tokenizer(
    generation: Generation,
    theirs: TokenizerConfig | None,
    config: TokenizerConfig,
    tokenizer: Tokenizer,
) -> Generation:
    """Return the generation settings for a model that is trained further with another tokenizer.
    ``theirs`` describes the original model's tokenizer, and ``config`` the new one, ``tokenizer``.
    Token ids are dropped if the two tokenizers give different ids for the same texts."""
    if theirs is None or theirs == config or not any(map(_is_id, generation)):
        return generation
    ours = mark_of(tokenizer, None)
    try:
        mark = mark_of(build_tokenizer(theirs), None)
    except (ValueError, OSError):  # the files no longer exist
        return generation
    if mark is None or ours is None or mark.digest == ours.digest:
        return generation
    return {name: value for name, value in generation.items() if not _is_id(name)}


def _is_id(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids"))


def write_generation(folder: Path, generation: Generation) -> None:
    """Write the settings to a folder, replacing an existing file and creating the folder if needed.
    Empty settings are not written."""
    if generation:
        folder.mkdir(exist_ok=True)
        write_json(folder / FILE, generation)


def write_of_run(
    folder: Path, tokenizer: Tokenizer, base: Generation, taught: frozenset[int] | None
) -> None:
    """Write the settings of a model trained from one with the settings ``base``. ``taught`` are the
    tokens with which its training texts ended. None means those of ``base`` and of the tokenizer,
    which end the documents of pretraining data."""
    taught = end_tokens(tokenizer, base) if taught is None else taught
    known = [token for token in ends_of(base) if token in taught]
    write_generation(folder, with_ends(base, [*known, *sorted(taught)]))


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path, lenient=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _tokens(value: Any, path: Path) -> list[int]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    for token in tokens:
        if type(token) is not int:
            raise CheckpointError(
                f"{path}: {_ENDS} is {value!r:.80}; expected the id of a token, or a list of ids"
            )
    return tokens


def _default_end(model_type: str | None) -> int | None:
    """Return the end-of-text token that `transformers` assumes for a model type if none is given,
    or None. It ignores the vocabulary size: 50256 even for a GPT-2 with 96 tokens."""
    # importing takes seconds
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type is None or model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type](), _ENDS, None)
