"""Digests that identify tokenizers and, in any format, checkpoints. Not all weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron.checkpoint.source import TOKENIZER_FILES
from megatron.config import TokenizerConfig
from megatron.tokenizer.registry import with_files
from megatron.util.digests import digest, digest_of_parts, digest_of_sample

_LARGEST_TOKENIZER_FILE = 2**26


_OTHER_TOKENIZERS = (".model", ".tiktoken", ".vocab")
"""Suffixes of tokenizer files with arbitrary names. Other files in such a folder may be models or
text."""


_READ_FILES = 64


_WEIGHTS = frozenset(".safetensors .bin .pt .pth .ckpt".split())


_ABOUT_WEIGHTS = frozenset(("config.json", "params.json", "adapter_config.json"))
"""Files other than weight files that determine a model. Others, such as README.md, are ignored."""


def checkpoint_digest(folder: Path) -> str:
    """Return a digest that identifies a checkpoint without reading all of its weights. It is the
    manifest's or, in formats without one, covers the names and sizes of weight and configuration
    files and blocks of some files."""
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return digest(manifest.read_bytes())
    if folder.is_file():
        return digest_of_sample(folder)
    weights = [path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()]
    if not weights:  # other programs may write one folder per rank
        weights = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    return digest_of_files(folder, [*weights, *(folder / name for name in _ABOUT_WEIGHTS)])


def digest_of_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return a digest of the names and sizes of the files that exist, and of blocks of some of
    them. Names are relative to ``folder``."""
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
