"""Generation settings of a model, as in ``generation_config.json`` of `transformers`: above all the
tokens at which its texts end. A checkpoint has that file next to its tokenizer's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.config import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.mark import mark_of

Generation = dict[str, Any]
"""The keys of a ``generation_config.json``; empty where nothing is known."""
FILE = "generation_config.json"
_ENDS = "eos_token_id"
OF_WRITER = ("transformers_version", "_from_model_config", "_name_or_path")
"""Keys about the program that wrote the file, and the folder where it did."""
_INNER = ("decoder", "generator", "text_config")
"""Sections of a config.json in which `transformers` looks for what the file itself lacks."""


def read_generation(folder: Path, rows: int, model_type: str | None = None) -> Generation:
    """The ``generation_config.json`` of a folder, and where it names no end of a text, the one that
    config.json names: `transformers` reads that where the other file is missing.

    Args:
        rows: tokens that the model has.
        model_type: of the config.json of the folder; None if it has none of `transformers`.

    Raises:
        CheckpointError: one of the files is malformed, or a text is to end at what is not a token.
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
    """The tokens that end a text; empty if the model does not name them."""
    return _tokens(generation.get(_ENDS), Path(FILE))


def end_tokens(tokenizer: Tokenizer, generation: Generation) -> frozenset[int]:
    """Return the tokens at which a model's texts end: its own, and its tokenizer's end-of-text or
    end-of-document tokens; possibly none."""
    return tokenizer.ends.union(ends_of(generation))


def with_ends(generation: Generation, ends: Iterable[int]) -> Generation:
    """The same with other tokens that end a text, as `transformers` writes them: a number, or a
    list of several."""
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
    """The settings of a model whose tokenizer is ``theirs``, for one that is trained from it with
    another (``tokenizer`` of ``config``): without ids of tokens, if the two give other ids to the
    same texts."""
    if theirs is None or theirs == config or not any(map(_is_id, generation)):
        return generation
    ours = mark_of(tokenizer, None)
    try:
        mark = mark_of(build_tokenizer(theirs), None)
    except (ValueError, OSError):  # its files are no longer there
        return generation
    if mark is None or ours is None or mark.digest == ours.digest:
        return generation
    return {name: value for name, value in generation.items() if not _is_id(name)}


def _is_id(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids"))


def write_generation(folder: Path, generation: Generation) -> None:
    """Adds the file to a folder, which is created if it does not exist, or replaces the one there.
    Writes nothing where nothing is known."""
    if generation:
        folder.mkdir(exist_ok=True)
        write_json(folder / FILE, generation)


def write_of_run(
    folder: Path, tokenizer: Tokenizer, base: Generation, taught: frozenset[int] | None
) -> None:
    """:func:`write_generation` for a model that was trained from one with the settings ``base``, to
    end its texts at the tokens ``taught``; None for the base's and the tokenizer's, which end the
    documents of the data."""
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
    """Value of `transformers` for a model of any vocabulary (50256 for a GPT-2 of 96 tokens)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes seconds

    if model_type is None or model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type](), _ENDS, None)
