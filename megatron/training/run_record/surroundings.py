"""What a process was started with: command lines, variables of the environment, packages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from megatron.training.run_record.secrets import HIDDEN
from megatron.util.json_text import parse_json

_PREFIXES = tuple(
    """ATEN_ CUBLAS_ CUDA_ CUDNN_ DEEPSPEED_ DS_ FI_ GLOO_ GOMP_ HF_ HIP_ KMP_ KUBERNETES_ LOCAL_
    MASTER_ MEGATRON_ MIOPEN_ MKL_ MLFLOW_ NCCL_ NVIDIA_ NVTE_ OMPI_COMM_ OMP_ ONEDNN_ ONEFLOW_
    PMI_ PYTHON PYTORCH_ RANK RCCL_ RDMAV_ ROCM_ ROCR_ SKYPILOT_ SLURM_ TENSORBOARD_ TOKENIZERS_
    TORCH TRACKIO_ TRANSFORMERS_ TRITON_ UCX_ WANDB_ WORLD_SIZE""".split()
)
_NAMES = frozenset(
    """CONDA_DEFAULT_ENV GROUP_RANK GROUP_WORLD_SIZE LC_ALL LANG LD_LIBRARY_PATH LD_PRELOAD PATH
    ROLE_RANK TMPDIR VIRTUAL_ENV""".split()
)
_OF_A_LAUNCHER = tuple(
    """GROUP_ KUBERNETES_ LOCAL_ MASTER_ OMPI_COMM_ PMI_ RANK ROLE_ SKYPILOT_ SLURM_ TORCHELASTIC_
    WORLD_SIZE""".split()
)
"""Variables that a launcher sets for each process."""
_LAUNCHERS = re.compile(r"\b(?:torchrun|torch\.distributed|deepspeed|srun|mpirun|mpiexec)\b")
_GENERATIONS = 8


def variables_that_count(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of which libraries, launchers and this project take notice, in the order of names."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def own_command() -> list[str]:
    """The command line of this process."""
    return list(sys.orig_argv)


def launcher_command() -> list[str] | None:
    """The command line of the outermost process that started this one for a run: a launcher's, or
    that of the same program; None if none did."""
    program = os.path.basename(sys.argv[0])
    found = None
    with contextlib.suppress(psutil.Error, OSError):
        for parent in psutil.Process().parents()[:_GENERATIONS]:
            words = parent.cmdline()
            shell = os.path.basename(words[0]) in ("bash", "sh", "dash", "zsh") if words else True
            names = {os.path.basename(word) for word in words[:4]}
            if not shell and (program in names or _LAUNCHERS.search(" ".join(words[:4]))):
                found = words
    return found


def shell_script(
    title: str, folder: str, environment: Mapping[str, str], command: Sequence[str]
) -> str:
    """A script that starts the same command in the same folder, with the same Python and the
    variables that no launcher sets; those that are hidden are only named."""
    lines = [f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"]
    for name, value in environment.items():
        if value == HIDDEN:
            lines.append(f"# {name} was set, and is secret")
        elif not name.startswith(_OF_A_LAUNCHER) and name not in ("PATH", "TMPDIR"):
            lines.append(f"export {name}={shlex.quote(value)}")
    start = "\n".join([f"cd {shlex.quote(folder)} || exit 1", *lines])
    return f"#!/bin/sh\n# {title}\n{start}\nexec {shlex.join(command)}\n"


def installed_packages() -> list[str]:
    """Lines for pip, as ``pip freeze`` writes them, from the names of folders: to read the
    description of each package takes a second."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder or "."):
                match = re.fullmatch(r"(.+?)-(.+)\.dist-info", entry.name)
                if match is not None:
                    name = match[1].replace("_", "-").lower()
                    found.setdefault(name, _requirement(name, match[2], Path(entry.path)))
    return [found[name] for name in sorted(found)]


def _requirement(name: str, version: str, folder: Path) -> str:
    """With where it came from, if that was an address or a folder (PEP 610)."""
    try:
        origin = parse_json((folder / "direct_url.json").read_text(), "direct_url.json")
        url = origin["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{name}=={version}"
    control = origin.get("vcs_info")
    if isinstance(control, dict):
        return f"{name} @ {control.get('vcs')}+{url}@{control.get('commit_id')}"
    if isinstance(directory := origin.get("dir_info"), dict) and directory.get("editable"):
        return f"-e {url}  # {name}=={version}"
    return f"{name} @ {url}"


def as_json(value: object) -> bytes:
    """For people: indented, in the order given."""
    return json.dumps(value, indent=1, default=str).encode() + b"\n"
