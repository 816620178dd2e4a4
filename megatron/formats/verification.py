"""Looks whether checkpoints are whole: what loading checks, and every tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint.

    Attributes:
        folder: where it is.
        form: its format; empty when that is what is wrong.
        files: number of files in it.
        bytes: their size.
        parameters: number of parameters that it says it holds.
        error: what is wrong with it, with the file's name; None when nothing is.
    """

    folder: Path
    form: str = ""
    files: int = 0
    bytes: int = 0
    parameters: int = 0
    error: str | None = None


def verify_all(path: Path, every: bool = False) -> Iterator[Verdict]:
    """Verifies the checkpoint that loading would take, or all of a folder.

    Args:
        path: one checkpoint of any format, or a folder of several.
        every: in a folder of this project's checkpoints, all of them.
    """
    tags: list[str | None] = []
    if every and path.is_dir():
        tags += complete_tags(path)
    for wanted in tags or [None]:
        try:
            found = locate_checkpoint(path, wanted)
            if found is None:
                raise CheckpointError(f"{path}: there is no complete checkpoint")
        except (ValueError, OSError) as error:
            yield Verdict(path / (wanted or ""), error=str(error))
        else:
            yield verify_checkpoint(found)
    if tags:
        # Each of them may be whole, and the tracker name none.
        try:
            locate_checkpoint(path)
        except (ValueError, OSError) as error:
            yield Verdict(path, error=str(error))


def verify_checkpoint(found: FoundCheckpoint) -> Verdict:
    """Verifies one checkpoint: what its format checks when it is loaded, and every tensor."""
    folder, title = found.folder, found.form.title
    files = [path for path in folder.rglob("*") if path.is_file()] or [folder]
    size, names, error = sum(path.stat().st_size for path in files), list[str](), None
    try:
        source = found.open()
        names = list(source.names())
        source.check_tensors()
    except (ValueError, OSError) as caught:
        error = str(caught)
    return Verdict(folder, title, len(files), size, len(names), error)
