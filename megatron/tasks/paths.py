"""Files and folders that the flags of a task name, checked before anything is computed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.config import ConfigError


def check_inputs(flag: str, paths: Sequence[str | Path], folders: bool = False) -> None:
    """Raises ConfigError if one of the paths of a flag does not exist or is a folder; with
    ``folders``: is not one."""
    wanted = "folder" if folders else "file"
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{flag} {path} does not exist; name a {wanted}")
        if path.is_dir() != folders:
            found = "folder" if path.is_dir() else "file"
            inside = f" in it, such as {_some(path)}" if found == "folder" and _some(path) else ""
            raise ConfigError(f"{flag} {path} is a {found}; name a {wanted}{inside}")


def check_output(flag: str, path: str | Path | None) -> None:
    """Creates the folder of a file that is written at the end. Raises ConfigError if that or
    writing there is not possible, or the path is a folder."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot write to {path.parent} ({error.strerror}); choose a folder "
            "with write access"
        ) from None


def _some(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir() if child.is_file())
    return names[0] if names else ""
