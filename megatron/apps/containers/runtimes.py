"""The command line of each program that runs containers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.containers.job import ContainerJob
from megatron.config import ConfigError

SHM_SIZE = "8g"
"""Of /dev/shm, where a container has its own; docker's 64 MB are too few for NCCL and loaders."""

NO_USER_PACKAGES = {"PYTHONNOUSERSITE": "1"}
"""Where a container sees the home folder: packages of ~/.local do not fit the image's Python."""


@dataclass(frozen=True)
class Runtime:
    """A way to run containers.

    Attributes:
        programs: the names of its program, the first that is installed is used.
        command: words that run a job, from the program's name.
        isolated: whether nothing of this machine is seen but the mounts.
    """

    programs: tuple[str, ...]
    command: Callable[[str, ContainerJob], list[str]]
    isolated: bool = True


def find_runtime(name: str | None) -> tuple[str, str]:
    """A runtime of :data:`RUNTIMES` and its program: the named one, or the first that is installed.

    Raises:
        ConfigError: no such program is installed.
    """
    candidates = RUNTIMES if name is None else {name: RUNTIMES[name]}
    for found, runtime in candidates.items():
        for program in runtime.programs:
            if shutil.which(program):
                return found, program
    looked_for = ", ".join(p for runtime in candidates.values() for p in runtime.programs)
    missing = "--runtime" if name is None else f"--runtime {name}"
    raise ConfigError(
        f"{missing}: none of these programs is installed: {looked_for}; install one, or print the "
        "command with --dry-run --runtime NAME"
    )


def check_image(name: str, program: str, image: str) -> None:
    """Raises ConfigError if it is known without a registry that an image does not exist."""
    if name == "apptainer" and _is_file(image) and not Path(image).exists():
        raise ConfigError(
            f"--image {image}: does not exist; {program} build {image} docker://NAME:TAG makes it"
        )
    if name in ("docker", "podman") and image.startswith("localhost/"):
        done = subprocess.run([program, "image", "inspect", image], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["not found"])[-1]
            raise ConfigError(
                f"--image {image}: {reason}; {program} build -t {image} . in a checkout makes it"
            )


def _docker(program: str, job: ContainerJob) -> list[str]:
    gpus: list[str] = []
    if job.gpus.devices:  # quotes of its own: docker splits the value at commas
        gpus = ["--gpus", f'"device={",".join(job.gpus.devices)}"']
    elif job.gpus.wanted:
        gpus = ["--gpus", str(job.gpus.count or "all")]
    # An init process passes signals on, and locked memory is what InfiniBand registers.
    return _like_docker(program, job, ["--init", "--ulimit", "memlock=-1", *gpus])


def _podman(program: str, job: ContainerJob) -> list[str]:
    # SELinux would refuse the mounts, or require new labels on the user's files.
    own = ["--security-opt", "label=disable"]
    for device in ("all",) if job.gpus.every else job.gpus.chosen:
        own += ["--device", f"nvidia.com/gpu={device}"]
    if job.user is not None and job.user.uid:  # ids are the same inside and outside
        own += ["--userns", "keep-id"]
    return _like_docker(program, job, own)


def _like_docker(program: str, job: ContainerJob, own: list[str]) -> list[str]:
    words = [program, "run", "--rm", *(["-i", "-t"] if job.terminal else [])]
    words += ["--network", job.network, "--shm-size", job.shm_size or SHM_SIZE, *own]
    environment = dict(job.environment)
    if job.user is not None:
        words += ["--user", f"{job.user.uid}:{job.user.gid}"]
        if job.user.uid:  # the image need not know the user, who then has neither name nor home
            environment = {"HOME": "/tmp", "USER": job.user.name, **environment}
    for mount in job.mounts:
        words += ["-v", mount.text]
    words += ["-w", job.workdir]
    for name in job.passed:
        words += ["-e", name]
    for name, value in environment.items():
        words += ["-e", f"{name}={value}"]
    return [*words, *job.options, job.image, *job.words]


def _apptainer(program: str, job: ContainerJob) -> list[str]:
    _refuse_own_namespaces(program, job)
    words = [program, "exec"]
    environment = NO_USER_PACKAGES | dict(job.environment)
    if job.gpus.wanted:
        words.append("--nv")
    if job.gpus.chosen:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus.chosen)
    if job.user is None:
        words.append("--fakeroot")
    for mount in job.mounts:
        words += ["--bind", mount.text]
    words += ["--pwd", job.workdir]
    for name, value in environment.items():
        words += ["--env", f"{name}={value}"]
    image = job.image if "://" in job.image or _is_file(job.image) else f"docker://{job.image}"
    return [*words, *job.options, image, *job.words]


def _pyxis(program: str, job: ContainerJob) -> list[str]:
    _refuse_own_namespaces("pyxis", job)
    words = [program, *(["--pty"] if job.terminal else [])]
    if job.gpus.devices:
        raise ConfigError(
            f"--gpus device={','.join(job.gpus.devices)}: slurm chooses the GPUs; give their number"
        )
    if job.gpus.count:
        words += ["--gpus-per-node", str(job.gpus.count)]
    words += ["--container-image", _enroot_image(job.image)]
    words += ["--container-mounts", ",".join(mount.text for mount in job.mounts)]
    words += ["--container-workdir", job.workdir]
    if job.user is None:
        words.append("--container-remap-root")
    if job.passed:
        words += ["--container-env", ",".join(job.passed)]
    environment = NO_USER_PACKAGES | dict(job.environment)
    values = [f"{name}={value}" for name, value in environment.items()]
    return [*words, *job.options, "env", *values, *job.words]


def _enroot_image(image: str) -> str:
    """Pyxis separates the registry from the image's name by ``#``."""
    registry, slash, rest = image.partition("/")
    if _is_file(image) or "#" in image or "://" in image or not slash:
        return image
    is_host = "." in registry or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if is_host else image


def _is_file(image: str) -> bool:
    return image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))


def _refuse_own_namespaces(runtime: str, job: ContainerJob) -> None:
    if job.network != "host":
        raise ConfigError(
            f"--network {job.network}: {runtime} uses this machine's network; leave the flag out"
        )
    if job.shm_size is not None:
        raise ConfigError(
            f"--shm-size {job.shm_size}: {runtime} uses this machine's /dev/shm; leave the flag out"
        )


RUNTIMES = {
    "docker": Runtime(("docker",), _docker),
    "podman": Runtime(("podman",), _podman),
    "apptainer": Runtime(("apptainer", "singularity"), _apptainer, isolated=False),
    "pyxis": Runtime(("srun",), _pyxis),
}
"""In the order in which they are looked for."""
