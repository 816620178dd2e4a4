"""The formats that a checkpoint can have: a new one is a file and a name here.

Only names are known here; what they stand for is imported when it is needed.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER
from megatron.checkpoint.source import Source

READERS = {
    "native": "megatron.checkpoint.reader:CheckpointReader",
    "deepspeed": "megatron.formats.deepspeed_folders.folder:DeepSpeedFolder",
    "universal": "megatron.formats.deepspeed_folders.universal:UniversalFolder",
    "legacy_megatron": "megatron.formats.legacy_megatron.reader:MegatronCheckpoint",
    "huggingface": "megatron.formats.huggingface.source:HuggingFaceFolder",
}
"""The :class:`Source` of each format, in the order in which they are tried. A universal checkpoint
is a copy, which may be older than what it was made of."""

WRITERS = {"universal": "megatron.formats.deepspeed_folders.universal:save_universal"}
"""What writes a copy of a checkpoint in another format."""


def reader(name: str) -> type[Source]:
    """The class of a format of :data:`READERS`."""
    return resolve_name(READERS[name])


def save_copy(name: str, source: Source, save: Path, stage: int) -> Path:
    """Writes a copy in a format of :data:`WRITERS` into a folder of checkpoints.

    Args:
        name: the format.
        source: what is copied.
        save: the folder.
        stage: ZeRO stage of the runs that will load it.

    Returns:
        The copy.

    Raises:
        CheckpointError: the source is damaged.
        OSError: a file cannot be written; nothing is left behind.
    """
    return resolve_name(WRITERS[name])(source, save, stage)


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was found and is not yet open.

    Attributes:
        form: its format.
        folder: where it is.
    """

    form: type[Source]
    folder: Path

    def open(self, verify: bool = True) -> Source:
        """Opens it.

        Args:
            verify: compare the files with their checksums first, where the format has them.

        Raises:
            CheckpointError: it is damaged or cannot be represented here.
        """
        if verify:
            self.form.verify(self.folder)
        return self.form(self.folder)


def locate_checkpoint(
    load: str | Path, wanted: str | None = None, prefer: str = "native"
) -> FoundCheckpoint | None:
    """Finds a checkpoint of any format.

    Args:
        load: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        prefer: the format to look for first.

    Returns:
        None when there is none: no such folder, or one without checkpoints and trackers.

    Raises:
        CheckpointError: the wanted one is not there, or a tracker names one that is not.
    """
    path, refusal = Path(load), None
    tracker = path / TRACKER
    names = [] if _is_empty(path) else sorted(READERS, key=lambda name: name != prefer)
    for form in map(reader, names):
        try:
            folder = form.locate(path, wanted)
        except CheckpointError as error:
            # The folder may have several formats, and the wanted one be of another.
            refusal = refusal or error
            if wanted is None and tracker.is_file():
                wanted = tracker.read_text(errors="replace").strip()
            continue
        if folder is not None:
            return FoundCheckpoint(form, folder)
    if refusal is not None:
        raise refusal
    if wanted is not None:
        raise CheckpointError(f"{path} has no complete checkpoint {wanted}")
    for tracker in (path / TRACKER, path / MEGATRON_TRACKER):
        if tracker.is_file():
            named = tracker.read_text(errors="replace").strip()
            raise CheckpointError(
                f"{tracker} names {named!r}, but {path} has no complete checkpoint of a known "
                f"format: {', '.join(reader(name).title for name in names)}"
            )
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and no checkpoint of a known format")
    return None


def _is_empty(path: Path) -> bool:
    """Whether nothing is there: a run that starts at the beginning need not import any format."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def open_checkpoint(load: str | Path, wanted: str | None = None, verify: bool = True) -> Source:
    """Opens a checkpoint of any format.

    Args:
        load: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        verify: see :meth:`FoundCheckpoint.open`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = locate_checkpoint(load, wanted)
    if found is None:
        raise CheckpointError(f"{load}: there is no complete checkpoint")
    return found.open(verify)
