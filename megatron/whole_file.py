"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file, or replaces it, at once.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    part = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
