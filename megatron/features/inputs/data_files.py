"""Comparison of a resumed run's data files with those of the previous run."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import RunConfig
from megatron.config.data import SOURCE_FIELDS
from megatron.data.build import DataFile
from megatron.features.inputs.flags import ChangedDataFlags
from megatron.util.secrets import without_secrets

_DATA_FLAGS = (*SOURCE_FIELDS, "corpora_file")


def changed_files(
    before: Sequence[DataFile], now: Sequence[DataFile], same_flags: bool
) -> list[str]:
    """Describe the differences between the files of a run and of the previous run, one value per
    line. If the data flags are the same, the files of each split are compared in order, whatever
    their paths. Otherwise files with the same path are compared."""
    if not same_flags:
        known = {(file.part, file.path): file for file in before}
        pairs = [(known[file[:2]], file) for file in now if file[:2] in known]
        return [line for old, new in pairs for line in _changes(old, new, ("content",))]
    lines = list[str]()
    for part in dict.fromkeys(file.part for file in now):
        old = [file for file in before if file.part == part]
        new = [file for file in now if file.part == part]
        if old and len(old) != len(new):
            lines.append(f"{part}: {len(old)} files, and {len(new)} now")
        for pair in zip(old, new, strict=False) if len(old) == len(new) else ():
            lines += _changes(*pair, ("weight", "share", "content"))
    return list(dict.fromkeys(lines))


def _changes(old: DataFile, new: DataFile, compared: Sequence[str]) -> list[str]:
    where = new.path if new.path == old.path else f"{new.path} (before: {old.path})"
    before, now = old._asdict(), new._asdict()
    before["share"], now["share"] = list(old.share), list(new.share)
    values = [(name, before[name], now[name]) for name in compared if name != "content"]
    if "content" in compared:
        names = sorted(old.content.keys() & new.content.keys())
        values += [(name, old.content[name], new.content[name]) for name in names]
    return [
        f"{where}: {name} was {was} and is {found}" for name, was, found in values if was != found
    ]


def changed_data(source: Source, config: RunConfig, files: Sequence[DataFile]) -> list[str]:
    """Return the data files that have changed since the checkpoint was saved, one per line. Empty
    if the flags name other files or the checkpoint has no record. Raises CheckpointError if there
    are any, unless ``--allow-changed-data`` is given."""
    try:
        saved = [DataFile(**file) for file in source.state.get("data", ())]
        files = [DataFile(**without_secrets(file._asdict())) for file in files]
        before = {} if source.run is None else source.run.to_dict()["data"]
        now = without_secrets(config.to_dict()["data"])
        same = all(list(before.get(name) or ()) == list(now[name] or ()) for name in _DATA_FLAGS)
        differences = changed_files(saved, files, same)
    except (TypeError, AttributeError):
        raise CheckpointError(f"{source.folder}: its list of data files is malformed") from None
    if differences and not ChangedDataFlags.of(config.checkpoint).allow_changed_data:
        raise CheckpointError(
            f"{source.folder} was saved by a run on other data: {'; '.join(differences[:3])}"
            + (f", and {len(differences) - 3} more differences" if len(differences) > 3 else "")
            + "; restore the files, or give --allow-changed-data to continue with those of now"
        )
    return differences
