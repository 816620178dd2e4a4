"""The token files that are being written, by several processes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


class TokenFiles:
    """Writes tokens where they belong in files that are there already, one for each key.

    Each process has its own, and none writes where another does.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises OSError where a file cannot be written."""
        self._files = [(path, open(path, "r+b", buffering=0)) for path in paths]  # noqa: SIM115

    def write(self, offsets: Sequence[int], tokens: Sequence[np.ndarray]) -> None:
        """Writes the tokens of each key from a byte of its file on.

        Raises:
            OSError: it cannot be written, as on a full disk; the message names the file.
        """
        for (path, file), offset, of_key in zip(self._files, offsets, tokens, strict=True):
            try:
                file.seek(offset)
                left = of_key.data.cast("B") if len(of_key) else memoryview(b"")
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error

    def close(self) -> None:
        """Ends writing."""
        for _, file in self._files:
            file.close()
