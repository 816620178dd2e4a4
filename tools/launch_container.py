#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Runs a command in a container, by docker, podman, apptainer, or slurm with pyxis.

    python3 tools/launch_container.py --src $PWD --image megatron \\
        --mount /data checkpoints --cmd "python3 pretrain_gpt.py --help"
    python3 tools/launch_container.py --runtime podman --image megatron --dry-run

The container sees the current folder, the source of --src and what --mount names, each at its own
path, starts in the current folder, and writes files that belong to you. The command's exit status
is returned. Without --cmd a shell is started. docs/how-to/containers.md has more.
"""

import getpass
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # the machine that starts containers need not have this project installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.apps.containers.job import (
    RUNTIMES,
    ContainerJob,
    ContainerUser,
    Mount,
    check_image,
    check_wheel,
    combine_mounts,
    command_words,
    find_runtime,
    parse_environment,
    parse_gpus,
    parse_mount,
    passed_names,
    unmounted_paths,
)
from megatron.config import ConfigError, FlagParser
from megatron.config.flags import build, option
from megatron.util.errors import one_line


@dataclass(frozen=True)
class LaunchConfig:
    """Launch: image, command and runtime."""

    image: str | None = option(None)
    """Name and tag of the image, or its file (.sif for apptainer, .sqsh for pyxis)."""
    cmd: str | None = option(None)
    """Command line that bash runs in the container; a shell by default."""
    src: str | None = option(None)
    """Checkout of this project that the command uses instead of the image's."""
    wheel: str | None = option(None)
    """Wheel that is installed in the container first, without what it requires."""
    runtime: str | None = option(
        None, choices=tuple(RUNTIMES), derived="the first of them that is installed"
    )
    """Program that runs the container; pyxis is slurm's srun."""
    gpus: str | None = option(None, derived="all if this machine has an NVIDIA driver, else none")
    """GPUs of the container: all, none, a number of them, or certain ones as device=0,2."""
    shm_size: str | None = option(None, derived="8g")
    """Size of /dev/shm with a unit of b, k, m or g, for docker and podman."""
    network: str = option("host")
    """Network of docker and podman; several nodes need host."""
    workdir: str | None = option(None, derived="the current folder")
    """Folder in the container where the command starts."""
    proxy: str | None = option(None)
    """Address of a proxy: sets http_proxy and https_proxy in the container."""
    root: bool = option(False)
    """Be root in the container, for an image or a command that requires it."""
    runtime_args: str | None = option(None)
    """Further words for the runtime, in one value: --runtime-args="--privileged"."""
    py: str | None = option(None, note="the container has one Python, that of its image")
    dry_run: bool = option(False)
    """Print the command, and do not run it."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command; it becomes the runtime's."""
    parser = FlagParser(LaunchConfig, description=__doc__)
    parser.add_argument(
        "--mount", "--extra-mount", nargs="+", action="extend", metavar="SOURCE[:TARGET[:ro]]",
        help="files or folders that the container sees, too; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--env", nargs="+", action="extend", metavar="NAME[=VALUE]",
        help="environment variables of the container, with the value that they have here unless "
        "one is given; may be repeated. Those of NCCL, torch, Hugging Face and the like are passed "
        "on without it",
    )  # fmt: skip
    settings: dict[str, Any] = parser.settings(argv)
    mounts, variables = settings.pop("mount", []), settings.pop("env", [])
    config: LaunchConfig = build(LaunchConfig, settings)
    try:
        job = job_of(config, mounts, variables)
        name, program = runtime_of(config)
        command = RUNTIMES[name].command(program, job)
        if not config.dry_run:
            check_image(name, program, job.image)
    except (ValueError, OSError) as error:
        sys.exit(f"launch_container.py: error: {one_line(error)}")
    for line in notes(config, job, name):
        print(f"launch_container.py: {line}", file=sys.stderr)
    print(shlex.join(command), flush=True)
    if not config.dry_run:
        os.execvp(command[0], command)  # signals and the exit status are the runtime's


def job_of(config: LaunchConfig, mounts: Sequence[str], variables: Sequence[str]) -> ContainerJob:
    """Return the command that runs, and what it sees of this machine."""
    if not config.image:
        raise ConfigError("give --image; docker build -t megatron . makes one from a checkout")
    if config.shm_size is not None and not re.fullmatch(r"[1-9]\d*[bkmg]?", config.shm_size):
        raise ConfigError(f"--shm-size {config.shm_size}: expected a size such as 8g or 512m")
    here, source, wheel = os.getcwd(), None, None
    places = [parse_mount(here, "current folder")]
    if config.src is not None:
        places.append(parse_mount(config.src, "--src"))
        source = Path(places[-1].source)
    if config.wheel is not None:
        wheel = check_wheel(Path(config.wheel))
        places.append(Mount(str(wheel), str(wheel), read_only=True))
    if config.workdir is not None and not config.workdir.startswith("/"):
        raise ConfigError(f"--workdir {config.workdir}: expected an absolute path in the container")
    gpus = parse_gpus(config.gpus or ("all" if shutil.which("nvidia-smi") else "none"))
    names, values = parse_environment(variables, os.environ)
    if config.proxy is not None:
        values |= {name: config.proxy for name in ("http_proxy", "https_proxy")}
        values |= {name.upper(): value for name, value in values.items() if "proxy" in name}
    passed = {*passed_names(os.environ, gpus), *names} - set(values)
    return ContainerJob(
        image=config.image,
        words=command_words(config.cmd, source, wheel),
        mounts=combine_mounts([*places, *map(parse_mount, mounts)]),
        workdir=config.workdir or here,
        passed=tuple(sorted(passed)),
        environment=values,
        gpus=gpus,
        shm_size=config.shm_size,
        network=config.network,
        user=None if config.root else ContainerUser(os.getuid(), os.getgid(), getpass.getuser()),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        options=tuple(shlex.split(config.runtime_args or "")),
    )


def runtime_of(config: LaunchConfig) -> tuple[str, str]:
    """The runtime and its program, which a printed command does not need."""
    try:
        return find_runtime(config.runtime)
    except ConfigError:
        if not config.dry_run or config.runtime is None:
            raise
        return config.runtime, RUNTIMES[config.runtime].programs[0]


def notes(config: LaunchConfig, job: ContainerJob, name: str) -> list[str]:
    """Notes for the user before the command starts."""
    lines = []
    if config.py is not None:
        lines.append(f"--py {config.py} is not used: the image's own Python runs the command")
    if config.cmd is not None and RUNTIMES[name].isolated:
        lines += [
            f"{path} is on this machine and not mounted; --mount SOURCE mounts a folder"
            for path in unmounted_paths(config.cmd, job.mounts)
        ]
    return lines


if __name__ == "__main__":
    main()
