"""Description of a command in a container, and its command line for each container runtime."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron.config import ConfigError

# Names, or name patterns, of environment variables that are passed to the container.
PASSED = (
    *("NCCL_*", "TORCH_*", "GLOO_*", "UCX_*", "OMP_*", "TRITON_*", "ONEFLOW_*", "MEGATRON_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"),
    *("HF_*", "WANDB_*", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)

SYSTEM = tuple("/bin /dev /etc /lib /opt /proc /root /run /sbin /sys /tmp /usr /var".split())
"""Folders that always come from the image."""

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Mount:
    """File or folder on this machine, and its path in the container. Both paths are absolute."""

    source: str
    target: str
    read_only: bool = False

    @property
    def text(self) -> str:
        """``SOURCE:TARGET``, followed by ``:ro`` if the container may only read."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


@dataclass(frozen=True)
class Gpus:
    """GPUs of a container: all of them, the first ``count``, or those in ``devices``."""

    every: bool = False
    count: int = 0
    devices: tuple[str, ...] = ()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Indices or UUIDs of the selected GPUs. Empty if all GPUs are selected."""
        return self.devices or tuple(map(str, range(self.count)))

    @property
    def wanted(self) -> bool:
        return self.every or bool(self.chosen)


class ContainerUser(NamedTuple):
    """User who runs the command and owns the files that it writes."""

    uid: int
    gid: int
    name: str


@dataclass(frozen=True)
class ContainerJob:
    """Command to run in a container.

    Attributes:
        image: name and tag of the image, or the path of an image file.
        words: the command and its arguments.
        workdir: working directory in the container.
        passed: names of environment variables to pass with their current values.
        environment: environment variables with new values.
        shm_size: size of /dev/shm in docker's format (8g). None if not given.
        network: network, in docker's notation.
        user: user in the container. None means root.
        options: further arguments for the runtime.
    """

    image: str
    words: tuple[str, ...]
    mounts: tuple[Mount, ...]
    workdir: str
    passed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: Gpus = Gpus()
    shm_size: str | None = None
    network: str = "host"
    user: ContainerUser | None = None
    terminal: bool = False
    options: tuple[str, ...] = ()


def parse_mount(text: str, flag: str = "--mount") -> Mount:
    """Parse ``SOURCE[:TARGET[:ro]]``. The default target is the source's path. Raises ConfigError
    if the source does not exist, the target is not absolute, or the format is wrong."""
    source, target, mode = [*text.split(":"), "", ""][:3]
    if text.count(":") > 2 or not source or mode not in ("", "ro", "rw"):
        raise ConfigError(f"{flag} {text}: expected SOURCE[:TARGET[:ro]]")
    if "," in text:
        raise ConfigError(f"{flag} {text}: a path with a comma cannot be mounted; rename it")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ConfigError(
            f"{flag} {text}: {path} does not exist on this machine; make the folder, "
            "or correct the path"
        )
    target = target or str(path)
    if not target.startswith("/") or PurePosixPath(target) == PurePosixPath("/"):
        raise ConfigError(
            f"{flag} {text}: {target} must be an absolute path in the container, and not / itself"
        )
    return Mount(str(path), str(PurePosixPath(target)), mode == "ro")


def combine_mounts(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts without duplicates. Raises ConfigError if two sources share a target."""
    by_target: dict[str, Mount] = {}
    for mount in mounts:
        other = by_target.setdefault(mount.target, mount)
        if other.source != mount.source:
            raise ConfigError(
                f"--mount {mount.text}: {other.source} is mounted at {mount.target} already; "
                "give one of them another place in the container"
            )
        if mount.read_only:
            by_target[mount.target] = mount
    return tuple(by_target.values())


def parse_gpus(text: str) -> Gpus:
    """Parse ``all``, ``none``, a number of GPUs, or ``device=0,2``, as docker does."""
    if text in ("all", "none"):
        return Gpus(every=text == "all")
    if text.isdecimal() and int(text):
        return Gpus(count=int(text))
    if text.startswith("device=") and all(devices := text.removeprefix("device=").split(",")):
        return Gpus(devices=tuple(devices))
    raise ConfigError(
        f"--gpus {text}: expected all, none, a number of GPUs, or certain ones as device=0,2"
    )


def passed_names(environment: Mapping[str, str], gpus: Gpus) -> tuple[str, ...]:
    """Return the names of the environment variables in :data:`PASSED` that are set here. If the
    container gets only some GPUs, CUDA_VISIBLE_DEVICES is left out, because GPUs are renumbered."""
    names = (name for name in environment if any(fnmatchcase(name, p) for p in PASSED))
    renumbered = () if gpus.every else ("CUDA_VISIBLE_DEVICES",)
    return tuple(sorted(name for name in names if name not in renumbered))


def parse_environment(
    entries: Iterable[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Split ``NAME`` and ``NAME=VALUE`` entries into names to pass and new values. Raises
    ConfigError if a name is malformed, or if a variable to pass is not set here."""
    passed, values = [], {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--env {entry}: expected NAME or NAME=VALUE")
        if equals:
            values[name] = value
        elif name in environment:
            passed.append(name)
        else:
            raise ConfigError(f"--env {name}: it is not set here; set it, or give {name}=VALUE")
    return tuple(passed), values


def check_wheel(path: Path) -> Path:
    """Return the absolute path of a wheel of this project, or of a package for it. Raises
    ConfigError for any other file, and for OneFlow's framework."""
    if path.suffix != ".whl":
        raise ConfigError(f"--wheel {path}: expected a file that ends in .whl")
    if path.name.startswith("oneflow-"):
        raise ConfigError(
            f"--wheel {path}: OneFlow itself is not used here; leave the flag out, or give a "
            "wheel of this project (python3 -m pip wheel --no-deps .)"
        )
    if not path.is_file():
        raise ConfigError(f"--wheel {path}: does not exist; python3 -m pip wheel --no-deps . "
                          "makes one of this project")  # fmt: skip
    return path.absolute()


def command_words(cmd: str | None, source: Path | None, wheel: Path | None) -> tuple[str, ...]:
    """Return the arguments that run ``cmd`` in the container's shell, or an interactive shell if it
    is None.

    Args:
        source: a checkout, mounted at its own path, whose modules take precedence over the image's.
        wheel: a wheel, mounted at its own path, to install for this container only. Its
          dependencies are not installed, because the image has them.
    """
    steps = []
    if wheel is not None:
        steps.append(
            'site=$(mktemp -d) && python3 -m pip install --quiet --no-deps --target "$site" '
            f'{shlex.quote(str(wheel))} || exit; export PATH="$site/bin:$PATH" '
            'PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"'
        )
    if source is not None:
        folders = ":".join(shlex.quote(str(f)) for f in (source, source / "compat"))
        steps.append(f"export PYTHONPATH={folders}${{PYTHONPATH:+:$PYTHONPATH}}")
    if not steps:
        return ("bash",) if cmd is None else ("bash", "-c", cmd)
    # Use exec, so that signals to the container reach the command. The command is a separate
    # argument, so that it is quoted only once and stays readable in the printed line.
    last, words = ("exec bash", ()) if cmd is None else ('exec bash -c "$0"', (cmd,))
    return ("bash", "-c", "; ".join([*steps, last]), *words)


def unmounted_paths(cmd: str, mounts: Sequence[Mount]) -> list[str]:
    """Return the absolute paths in a command line that are not visible in the container, although
    they or their parent folders exist on this machine."""
    try:
        words = shlex.split(cmd)
    except ValueError:
        return []
    paths = {word.partition("=")[2] if word.startswith("--") else word for word in words}
    seen = (*SYSTEM, *(mount.target for mount in mounts))
    return sorted(
        path
        for path in paths
        if path.startswith("/")
        and not any(PurePosixPath(path).is_relative_to(place) for place in seen)
        and (os.path.exists(path) or os.path.dirname(path) != "/" and Path(path).parent.exists())
    )


SHM_SIZE = "8g"  # docker's default of 64 MB is too small for NCCL and data loaders

# Containers that share the home folder would otherwise use ~/.local packages of another Python.
NO_USER_PACKAGES = {"PYTHONNOUSERSITE": "1"}


@dataclass(frozen=True)
class Runtime:
    """Container runtime: names of its program (the first installed one is used), the function that
    builds its command line, and whether the container sees only the job's mounts."""

    programs: tuple[str, ...]
    command: Callable[[str, ContainerJob], list[str]]
    isolated: bool = True


def find_runtime(name: str | None) -> tuple[str, str]:
    """Return the name of a runtime in :data:`RUNTIMES` and its program: the runtime ``name``, or
    the first one installed. Raises ConfigError if no such program is installed."""
    candidates = RUNTIMES if name is None else {name: RUNTIMES[name]}
    for runtime_name, runtime in candidates.items():
        for program in runtime.programs:
            if shutil.which(program):
                return runtime_name, program
    looked_for = ", ".join(p for runtime in candidates.values() for p in runtime.programs)
    missing = "--runtime" if name is None else f"--runtime {name}"
    raise ConfigError(
        f"{missing}: none of these programs is installed: {looked_for}; install one, or print the "
        "command with --dry-run --runtime NAME"
    )


def check_image(name: str, program: str, image: str) -> None:
    """Check an image without contacting a registry. Raises ConfigError if it is known not to
    exist."""
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
    if job.gpus.devices:  # quoted, because docker splits the value at commas
        gpus = ["--gpus", f'"device={",".join(job.gpus.devices)}"']
    elif job.gpus.wanted:
        gpus = ["--gpus", str(job.gpus.count or "all")]
    # An init process forwards signals. InfiniBand needs unlimited locked memory.
    return _like_docker(program, job, ["--init", "--ulimit", "memlock=-1", *gpus])


def _podman(program: str, job: ContainerJob) -> list[str]:
    # Otherwise SELinux would refuse the mounts, or relabel the user's files.
    options = ["--security-opt", "label=disable"]
    for device in ("all",) if job.gpus.every else job.gpus.chosen:
        options += ["--device", f"nvidia.com/gpu={device}"]
    if job.user is not None and job.user.uid:  # the same user ids inside and outside
        options += ["--userns", "keep-id"]
    return _like_docker(program, job, options)


def _like_docker(program: str, job: ContainerJob, own: list[str]) -> list[str]:
    words = [program, "run", "--rm", *(["-i", "-t"] if job.terminal else [])]
    words += ["--network", job.network, "--shm-size", job.shm_size or SHM_SIZE, *own]
    environment = dict(job.environment)
    if job.user is not None:
        words += ["--user", f"{job.user.uid}:{job.user.gid}"]
        if job.user.uid:  # the image may not know the user, who then has neither name nor home
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
    """Return an image name with ``#`` between registry and repository, as pyxis expects."""
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
"""Container runtimes by name, in the order in which they are searched for."""
