"""Environment of a process: its command line, environment variables, packages, and the places of a
run's ranks.

Only the variables that are listed in this file are recorded. A place is a host with its devices,
processors and memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron.config.command_line import parsed_words
from megatron.util.json_text import parse_json
from megatron.util.secrets import HIDDEN, Redactor, is_secret, is_secret_variable

_MOST_LINES = 64


@dataclass(frozen=True)
class RankPlace:
    """Place where a rank runs. ``device`` is the name of its accelerator, or of its processor if it
    has none. ``number`` is the accelerator's index on the host, as in :mod:`torch`, or None."""

    host: str
    device: str
    number: int | None
    processors: int
    memory_bytes: int


def own_place(device: torch.device) -> RankPlace:
    """Return the place of this process."""
    on_gpu = device.type == "cuda"
    number = (device.index or 0) if on_gpu else None
    return RankPlace(
        socket.gethostname(),
        torch.cuda.get_device_name(device) if on_gpu else _processor(),
        number,
        os.cpu_count() or 1,
        psutil.virtual_memory().total,
    )


def rank_map(places: Sequence[RankPlace]) -> list[str]:
    """Return a line for each host and its ranks, for the log. Hosts beyond a maximum number of
    lines are only counted."""
    lines = []
    for host in by_host(places):
        devices = Counter(host["devices"])
        what = ", ".join(f"{count} x {device}" for device, count in devices.items())
        lines.append(f"{host['host']} has {_ranks(host['ranks'])}: {what}")
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more} hosts more"]


def _ranks(ranks: Sequence[int]) -> str:
    """Describe ranks in words: rank 5, ranks 0 to 3, ranks 0, 2, 4."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    if list(ranks) == list(range(first, last + 1)):
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ranks))}"


def by_host(places: Sequence[RankPlace]) -> list[dict[str, Any]]:
    """Return the ranks of each host, as JSON values."""
    hosts: dict[str, dict[int, RankPlace]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, {})[rank] = place
    return [
        {
            "host": host,
            "ranks": list(here),
            "devices": [place.device for place in here.values()],
            "numbers": [place.number for place in here.values()],
            "processors": next(iter(here.values())).processors,
            "memory_bytes": next(iter(here.values())).memory_bytes,
        }
        for host, here in hosts.items()
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_PREFIXES = tuple(
    """ATEN_ CUBLAS_ CUDA_ CUDNN_ DEEPSPEED_ DS_ FI_ GLOO_ GOMP_ HIP_ KMP_ MEGATRON_ MIOPEN_ MKL_
    NCCL_ NVTE_ OMP_ ONEDNN_ ONEFLOW_ PYTORCH_ RCCL_ RDMAV_ ROCM_ ROCR_ TORCH TRITON_
    UCX_""".split()
)
"""Prefixes of environment variables that configure computation and communication libraries."""
_NAMES = frozenset(
    """GROUP_RANK GROUP_WORLD_SIZE LANG LC_ALL LD_LIBRARY_PATH LD_PRELOAD LOCAL_RANK LOCAL_SIZE
    LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES
    OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE
    PYTHONHASHSEED PYTHONOPTIMIZE PYTHONPATH RANK ROLE_RANK SLURM_GPUS_ON_NODE SLURM_JOB_ID
    SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_LOCALID SLURM_NNODES
    SLURM_NODEID SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT
    TOKENIZERS_PARALLELISM WANDB_MODE WORLD_SIZE""".split()
)
"""Environment variables of launchers, schedulers and Python."""
_OF_A_LAUNCHER = tuple(
    """GROUP_ LOCAL_ MASTER_ NODE_RANK OMPI_COMM_ PMI_ RANK ROLE_ SLURM_ TORCHELASTIC_
    WORLD_SIZE""".split()
)
"""Prefixes of variables that a launcher sets for each process."""
_OWN_LAUNCHER = ("--num-gpus-per-node", "--num-nodes")


def recorded_variables(environment: Mapping[str, str], redactor: Redactor) -> dict[str, str]:
    """Return the environment variables that affect what a run computes, sorted by name. Variables
    with secret names are left out, and secrets in values are hidden."""
    return {
        name: redactor.text(environment[name])
        for name in sorted(environment)
        if (name.startswith(_PREFIXES) or name in _NAMES) and not is_secret_variable(name)
    }


def without_secret_words(words: Sequence[str], redactor: Redactor) -> list[str]:
    """Return the words of a command line with the secrets hidden."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        flag = is_secret(name) and bool(re.fullmatch(r"-{1,2}[\w-]+|\w+", name))
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif flag and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redactor.text(word))
        hide = flag and not equals and word.startswith("--")
    return shown


def own_command(redactor: Redactor) -> list[str]:
    """Return this process's command with the flags that it has parsed. Secrets are hidden."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    python = os.path.basename(sys.executable) or "python"
    return [python, *program, *without_secret_words(parsed_words(), redactor)]


def launched_command(command: Sequence[str], hosts: int, processes: int) -> list[str] | None:
    """Return the command that starts all processes of a run on one host. Return None if ``command``
    does so itself, or if there are several hosts, each of which needs its own command."""
    starts_them = any(word.partition("=")[0] in _OWN_LAUNCHER for word in command)
    if processes == 1 or hosts > 1 or starts_them:
        return None
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # DeepSpeed's launcher adds this flag to the command of each process.
    words = [word for word in command[1:] if not re.fullmatch(r"--local[_-]rank=\d+", word)]
    return [command[0], *launcher, *words]


def shell_script(
    title: str, folder: str, environment: Mapping[str, str], command: Sequence[str]
) -> str:
    """Return a script that starts the same command in the same folder, with the same Python and the
    same environment variables, except those that a launcher sets."""
    lines = [f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"]
    for name, value in environment.items():
        if not name.startswith(_OF_A_LAUNCHER):
            lines.append(f"export {name}={shlex.quote(value)}")
    start = "\n".join([f"cd {shlex.quote(folder)} || exit 1", *lines])
    return f"#!/bin/sh\n# {title}\n{start}\nexec {shlex.join(command)}\n"


@functools.cache
def installed_packages() -> list[str]:
    """Return the installed packages as requirement lines, like ``pip freeze``. They are derived
    from folder names, because reading the metadata of all packages takes a second."""
    lines: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder or "."):
                name, dash, version = entry.name.removesuffix(".dist-info").partition("-")
                if dash and entry.name.endswith(".dist-info"):
                    name = name.replace("_", "-").lower()
                    lines.setdefault(name, _requirement(name, version, Path(entry.path)))
    return [lines[name] for name in sorted(lines)]


def _requirement(name: str, version: str, folder: Path) -> str:
    """Return a package's requirement line. It has the package's origin (PEP 610) if that is a URL
    or folder, and otherwise its version."""
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
