"""The formats that a checkpoint can have: a new one is a file and a name here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import Source
from megatron.formats.deepspeed_folders.folder import DeepSpeedFolder
from megatron.formats.deepspeed_folders.universal import UniversalFolder
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint

FORMATS: tuple[type[Source], ...] = (
    CheckpointReader,
    DeepSpeedFolder,
    UniversalFolder,
    MegatronCheckpoint,
    HuggingFaceFolder,
)
"""The known formats, in the order in which they are tried. A universal checkpoint is a copy, which
may be older than what it was made of."""


class Located(NamedTuple):
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
    load: str | Path, wanted: str | None = None, formats: Sequence[type[Source]] = FORMATS
) -> Located | None:
    """Finds a checkpoint of any format.

    Args:
        load: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        formats: those to look for.

    Returns:
        None when there is none: no such folder, or one without checkpoints and trackers.

    Raises:
        CheckpointError: the wanted one is not there, or a tracker names one that is not.
    """
    path, refusal = Path(load), None
    tracker = path / TRACKER
    for form in formats:
        try:
            folder = form.locate(path, wanted)
        except CheckpointError as error:
            # The folder may have several formats, and the wanted one be of another.
            refusal = refusal or error
            if wanted is None and tracker.is_file():
                wanted = tracker.read_text(errors="replace").strip()
            continue
        if folder is not None:
            return Located(form, folder)
    if refusal is not None:
        raise refusal
    if wanted is not None:
        raise CheckpointError(f"{path} has no complete checkpoint {wanted}")
    for tracker in (path / TRACKER, path / MEGATRON_TRACKER):
        if tracker.is_file():
            named = tracker.read_text(errors="replace").strip()
            raise CheckpointError(
                f"{tracker} names {named!r}, but {path} has no complete checkpoint of a known "
                f"format: {', '.join(form.title for form in formats)}"
            )
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and no checkpoint of a known format")
    return None


def open_checkpoint(load: str | Path, wanted: str | None = None, verify: bool = True) -> Source:
    """Opens a checkpoint of any format.

    Args:
        load: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        verify: see :meth:`Located.open`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = locate_checkpoint(load, wanted)
    if found is None:
        raise CheckpointError(f"{load}: there is no complete checkpoint")
    return found.open(verify)
