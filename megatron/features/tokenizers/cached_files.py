"""Vocabularies of published models in a folder, as downloads leave them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.base import FileNames, PublishedFiles
from megatron.util.json_text import parse_json

_OWNERS = ("", "openai-community--", "google-bert--")
"""Prefixes of the models' names in Hugging Face's cache."""


_LONGEST_NOTE = 1 << 16
"""Bytes of a file that says where another was downloaded from."""


def with_cached_files(config: TokenizerConfig, published: PublishedFiles) -> TokenizerConfig:
    """The configuration with the file that --tokenizer-model-type is the path of, or with files of
    --cache-dir where none are given, and without that folder. Raises ConfigError if it does not
    have them, FileNotFoundError."""
    completed = dataclasses.replace(config, cache_dir=None)
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
    """True if a path is named, as 2019's loader accepted, and not a model: a folder may have the
    name of one, but not where the model is searched for elsewhere."""
    if "/" in named or named.endswith(".txt"):
        return True
    return not (is_searched and named.startswith("bert-")) and Path(named).exists()


def _file_at(path: Path) -> str:
    """The vocabulary that is a path, or is in the folder of that path."""
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
    """A published model with the case, cased or uncased, that the last two names of a path say."""
    names = "/".join(Path(path).parts[-2:])
    return "bert-large-cased" if "-cased" in names or "chinese" in names else "bert-large-uncased"


def _places(folder: Path, model: str) -> Iterator[Path]:
    """Folders of the model's name, the snapshots of Hugging Face's cache, and the folder itself."""
    for parent in (folder, folder / "hub"):
        yield parent / model
        for owner in _OWNERS:
            yield from sorted(parent.glob(f"models--{owner}{model}/snapshots/*"))
    yield folder


def _first(place: Path, names: tuple[str, ...], model: str) -> str | None:
    paths = (place / name.format(model) for name in names)
    return next((str(path) for path in paths if path.is_file()), None)


def _downloaded(folder: Path, files: FileNames, model: str) -> dict[str, Any]:
    """Files as the downloads of 2019 named them: by a digest, with the address in DIGEST.json."""
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
