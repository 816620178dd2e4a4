"""Files that a command writes in the end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.config import ConfigError


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
