"""Programs for experiments that a run reports to, one file each, imported where a run uses it.

``open_writer`` of each file makes its writer; what all of them have in common is in ``tags``.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

_VARIABLES = {
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "wandb": {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_FINISH_TIMEOUT": "25",
        "WANDB_FINISH_TIMEOUT_RAISES": "true",
    },
}
"""Variables that a package reads at the import or later. Without the first ones it tells its makers
of its use or errors, also where a run reports to files only; without the others the process would
wait for W&B's server indefinitely when it ends."""


def package(name: str, asked: str, remedy: str) -> Any:
    """The module of a tracker. Raises ValueError, naming the flag that asked for it and what to do,
    if it is not installed."""
    for variable, value in _VARIABLES.get(name, {}).items():
        os.environ.setdefault(variable, value)
    try:
        module = import_module(name)
        spec = module.__spec__
        if spec is not None and spec.origin is None:  # a folder of this name, as wandb makes
            raise ImportError(f"{name} is a folder")
    except ImportError as error:
        raise ValueError(
            f"{asked} needs the package {name}, which is not installed: run `pip install {name}`, "
            f"or {remedy}"
        ) from error
    return module
