"""Digests of checkpoints of any format, without reading their weights, and of tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron.checkpoint.source import TOKENIZER_FILES
from megatron.config import TokenizerConfig
from megatron.tokenizer.registry import with_files
from megatron.util.digests import digest, digest_of_parts, digest_of_sample

_LARGEST_TOKENIZER_FILE = 2**26


_OTHER_TOKENIZERS = (".model", ".tiktoken", ".vocab")
"""Files of a folder that may have any name, even a model folder with other texts."""


_READ_FILES = 64


_WEIGHTS = frozenset(".safetensors .bin .pt .pth .ckpt".split())


_ABOUT_WEIGHTS = frozenset(("config.json", "params.json", "adapter_config.json"))
"""Files of a model's folder besides its weights. Others, such as README.md, change no weight."""


def checkpoint_digest(folder: Path) -> str:
    """Differs between checkpoints, without reading their weights: the manifest's digest where there
    is one; of other formats names and sizes of weights and configuration, and blocks of some."""
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return digest(manifest.read_bytes())
    if folder.is_file():
        return digest_of_sample(folder)
    weights = [path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()]
    if not weights:  # each rank of the other program may have a folder
        weights = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    return digest_of_files(folder, [*weights, *(folder / name for name in _ABOUT_WEIGHTS)])


def digest_of_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return names and sizes of a folder's existing files, and blocks of some."""
    files = sorted(path for path in paths if path.is_file())
    some = files[:: -(-len(files) // _READ_FILES) or 1]
    return digest_of_parts(
        (
            *(f"{path.relative_to(folder)}\0{path.stat().st_size}\0" for path in files),
            *map(digest_of_sample, some),
        )
    )


def tokenizer_digest(config: TokenizerConfig) -> str:
    """Return a digest of the content of a tokenizer's files."""
    config = with_files(config)
    return digest_of_parts(
        part
        for name in ("vocab_file", "merge_file", "tokenizer_model")
        for path in _tokenizer_files(getattr(config, name))
        for part in (f"{name}\0{path.name}\0", path.read_bytes())
    )


def _tokenizer_files(named: str | None) -> list[Path]:
    if named is None:
        return []
    path = Path(named)
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(
        file
        for file in path.iterdir()
        if (file.name in TOKENIZER_FILES or file.suffix in _OTHER_TOKENIZERS)
        and file.name != "generation_config.json"
        and file.is_file()
        and file.stat().st_size <= _LARGEST_TOKENIZER_FILE
    )
