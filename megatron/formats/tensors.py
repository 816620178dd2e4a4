"""Helpers for tensors in other programs' checkpoints: dtypes, and writing with the ``safetensors``
package."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import NotFiniteError, not_finite

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which other programs store weights, by their name in torch and config.json."""


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file with the ``safetensors`` package. It gets the permissions of any new file,
    whereas a file that the package creates is readable only by its owner. Raises OSError if it
    cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:  # for example because the disk is full
        raise OSError(f"{path} cannot be written: {error}") from None


def finite(name: str, values: Tensor, dtype: torch.dtype, where: Path) -> Tensor:
    """Convert a tensor of the checkpoint ``where`` to another dtype. Raises NotFiniteError if an
    element is not finite in ``dtype``."""
    reason = not_finite({name: values}, dtype)
    if reason is not None:
        raise NotFiniteError(f"{where}: {reason}")
    return values.to(dtype)
