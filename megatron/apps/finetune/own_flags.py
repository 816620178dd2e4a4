"""Messages in the flags of this command, which sets others by them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = {
    "--pretrained-checkpoint": "--model",
    "--data-path": "--data",
    "--train-data-path": "--data",
    "--valid-data-path": "--eval-data",
    "in --split": "in --held-out",
}
_PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, _NAMES))})(?![\w-])")


def in_own_flags(message: str) -> str:
    """A message in which flags that this command sets have the names of those that set them."""
    return _PATTERN.sub(lambda found: _NAMES[found.group()], message)


@contextmanager
def errors_in_own_flags() -> Iterator[None]:
    """Errors about flags that finetune.py sets name the flag of finetune.py that sets them."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_own_flags(error.args[0]),)
        raise
