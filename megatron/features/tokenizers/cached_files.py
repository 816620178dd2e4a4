"""Vocabulary files of published models, in a cache folder that an earlier download has filled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import ConfigError, TokenizerConfig
from megatron.util.json_text import parse_json

FileNames = tuple[tuple[str, tuple[str, ...]], ...]
"""For each configuration field, the possible names of its file. `{}` is replaced by the model's
name."""


class PublishedFiles(NamedTuple):
    """Published model whose vocabulary files may be in `--cache-dir`.

    Attributes:
        model: the model to use without `--tokenizer-model-type`.
        files: the possible names of its files.
        by_name: whether `--tokenizer-model-type` may be another model's name or a file's path.
    """

    model: str
    files: FileNames
    by_name: bool = False


_BPE = (
    ("vocab_file", ("{}-vocab.json", "vocab.json")),
    ("merge_file", ("{}-merges.txt", "merges.txt")),
)
_WORDPIECE = (("vocab_file", ("{}-vocab.txt", "vocab.txt")),)
_PUBLISHED = {
    "GPT2BPETokenizer": PublishedFiles("gpt2", _BPE),
    "BertWordPieceCase": PublishedFiles("bert-large-cased", _WORDPIECE, by_name=True),
    **dict.fromkeys(
        ("BertWordPieceLowerCase", "BertWordPieceTokenizer"),
        PublishedFiles("bert-large-uncased", _WORDPIECE, by_name=True),
    ),
}
"""Published models by tokenizer type."""
_OWNERS = ("", "openai-community--", "google-bert--")
"""Prefixes of the models' names in Hugging Face's cache."""


_LONGEST_NOTE = 1 << 16
"""Maximum size in bytes of a JSON file that records the URL of a download."""


def with_cached_files(config: TokenizerConfig) -> TokenizerConfig:
    """Return the configuration with its vocabulary files filled in, and without the cache folder.
    They are the file at the path in --tokenizer-model-type or, if no files are given, those in
    --cache-dir. Raises ConfigError if the cache folder lacks them, and FileNotFoundError if the
    path does not exist."""
    completed = dataclasses.replace(config, cache_dir=None)
    published = _PUBLISHED.get(config.tokenizer_type or "")
    if published is None:
        return completed
    model, files, by_name = published
    named = config.tokenizer_model_type
    if named and by_name:
        model = named
        if _is_path(named, config.cache_dir is not None):
            path = config.vocab_file or _file_at(Path(named))
            return dataclasses.replace(
                completed, vocab_file=path, tokenizer_model_type=_model_at(named)
            )
    if config.cache_dir is None or config.vocab_file or config.merge_file:
        return completed
    folder = Path(config.cache_dir)
    ways: list[dict[str, Any]] = [
        {field: _first(place, names, model) for field, names in files}
        for place in _places(folder, model)
    ]
    for paths in (*ways, _downloaded(folder, files, model)):
        if all(paths.values()):
            return dataclasses.replace(completed, **paths)
    wanted = " and ".join(" or ".join(name.format(model) for name in names) for _, names in files)
    flags = " and ".join("--" + field.replace("_", "-") for field, _ in files)
    raise ConfigError(
        f"--cache-dir {config.cache_dir} does not have the vocabulary of {model}, and nothing is "
        f"downloaded: put {wanted} there, or give {flags}"
    )


def _is_path(named: str, is_searched: bool) -> bool:
    """Return whether --tokenizer-model-type is a path, which the loader of 2019 accepted, instead
    of the name of a model. A folder may be called like a model, but if a cache folder is searched,
    the name means the model."""
    if "/" in named or named.endswith(".txt"):
        return True
    return not (is_searched and named.startswith("bert-")) and Path(named).exists()


def _file_at(path: Path) -> str:
    """Return the path of a vocabulary, given the file or its folder. Raises FileNotFoundError if it
    does not exist."""
    names = [path, path / "vocab.txt", path / f"{path.name}-vocab.txt"]
    file = next((file for file in names if file.is_file()), None)
    if file is None:
        problem = "has no vocab.txt" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"--tokenizer-model-type {path} {problem}; it must be the path of a vocab.txt or of "
            "its folder, or the name of a model of BERT (bert-large-cased), whose file is given by "
            "--vocab-file or is in --cache-dir"
        )
    return str(file)


def _model_at(path: str) -> str:
    """Return a published model that is cased or uncased like the vocabulary at a path, judging by
    the last two names in the path."""
    names = "/".join(Path(path).parts[-2:])
    return "bert-large-cased" if "-cased" in names or "chinese" in names else "bert-large-uncased"


def _places(folder: Path, model: str) -> Iterator[Path]:
    """Yield the folders to search: those with the model's name, its snapshots in Hugging Face's
    cache, and the cache folder itself."""
    for parent in (folder, folder / "hub"):
        yield parent / model
        for owner in _OWNERS:
            yield from sorted(parent.glob(f"models--{owner}{model}/snapshots/*"))
    yield folder


def _first(place: Path, names: tuple[str, ...], model: str) -> str | None:
    paths = (place / name.format(model) for name in names)
    return next((str(path) for path in paths if path.is_file()), None)


def _downloaded(folder: Path, files: FileNames, model: str) -> dict[str, Any]:
    """Return the files that a loader of 2019 downloaded, by configuration field. It named them by a
    digest and stored the URL in DIGEST.json."""
    files_by_field: dict[str, Any] = {field: None for field, _ in files}
    for note in sorted(folder.glob("*.json")):
        if not note.is_file() or note.stat().st_size > _LONGEST_NOTE:
            continue
        try:
            content = parse_json(note.read_bytes(), str(note), lenient=True)
        except (ValueError, OSError):
            continue
        address = content.get("url", "") if isinstance(content, dict) else ""
        for field, names in files:
            published = names[0].format(model)
            if str(address).endswith(f"/{published}") and note.with_suffix("").is_file():
                files_by_field[field] = str(note.with_suffix(""))
    return files_by_field
