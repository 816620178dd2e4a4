"""Looks whether checkpoints are whole: what loading checks, and every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.reader import CheckpointReader, tensor_key
from megatron.checkpoint.registry import Located, locate_checkpoint
from megatron.checkpoint.source import Source


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


def verify_checkpoint(found: Located) -> Verdict:
    """Verifies one checkpoint: files against the manifest, index, counters, and tensors. Of another
    format every tensor is read."""
    folder, title = found.folder, found.form.title
    files = [path for path in folder.rglob("*") if path.is_file()] or [folder]
    size, names, error = sum(path.stat().st_size for path in files), list[str](), None
    try:
        source = found.open()
        names = list(source.names())
        if isinstance(source, CheckpointReader):
            check_tensors(source)
        else:
            read_all(source, names)
    except (ValueError, OSError) as caught:
        error = str(caught)
    return Verdict(folder, title, len(files), size, len(names), error)


def check_tensors(reader: CheckpointReader) -> None:
    """Looks for the tensor of every piece, by the heads of the files alone.

    Raises:
        CheckpointError: one is not there, or of another size or number format.
    """
    wanted: dict[str, dict[str, int]] = {}
    for name, pieces in reader.pieces.items():
        for piece in pieces:
            for kind, file in piece.files.items():
                key = tensor_key(name, kind, piece.part)
                wanted.setdefault(file, {})[key] = piece.numel
    for file, tensors in wanted.items():
        path = reader.folder / file
        try:
            with safe_open(path, framework="np") as stored:
                for key in sorted(tensors.keys() - set(stored.keys())):
                    raise CheckpointError(f"{path} has no tensor {key}")
                for key, numel in tensors.items():
                    tensor = stored.get_slice(key)
                    _check_tensor(path, key, tensor.get_shape(), tensor.get_dtype(), numel)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def _check_tensor(path: Path, key: str, shape: Sequence[int], dtype: str, numel: int) -> None:
    found = 1
    for size in shape:
        found *= size
    if found != numel:
        raise CheckpointError(f"{path}: {key} has {found} elements, the index says {numel}")
    if dtype != "F32":
        raise CheckpointError(f"{path}: {key} is {dtype}, and not F32")


def read_all(source: Source, names: Sequence[str]) -> None:
    """Reads every tensor.

    Raises:
        CheckpointError: one is missing or malformed.
    """
    for name in names:
        for kind in source.kinds(name):
            source.tensor(name, kind)
