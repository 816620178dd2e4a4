"""A converted folder that is complete or absent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import replace_folder, unfinished_folder


@contextmanager
def published(
    output: Path, overwrite: bool, source: Path, mark: str = "generation_config.json"
) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its place when the block ends well.

    Args:
        output: where the result is to be.
        overwrite: whether an earlier result there may be replaced.
        source: folder that is being converted; never removed.
        mark: file by which an earlier result is known.

    Raises:
        CheckpointError: ``output`` may not be replaced, or cannot be written.
    """
    output = output.resolve()
    _check(output, overwrite, source.resolve(), mark)
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(unfinished_folder(output))
        except OSError as error:
            raise CheckpointError(f"--output {output}: cannot write there: {error}") from None
        yield temporary
        replace_folder(temporary, output, {})


def _check(output: Path, overwrite: bool, source: Path, mark: str) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise CheckpointError(f"--output {output} is a file; name a folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"--output {output} is not empty; give --overwrite to replace it or name another folder"
        )
    if source.is_relative_to(output) or output.is_relative_to(source):
        raise CheckpointError(f"--output {output} and the checkpoint {source} contain each other")
    if not (output / mark).is_file():
        raise CheckpointError(
            f"--output {output} holds no converted model (no {mark}), so --overwrite does not "
            "replace it; name another folder"
        )
