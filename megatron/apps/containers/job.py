"""What a container runs and what it sees of this machine, for any program that runs containers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron.config import ConfigError

PASSED = (
    *("NCCL_*", "TORCH_*", "GLOO_*", "UCX_*", "OMP_*", "TRITON_*", "ONEFLOW_*", "MEGATRON_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"),
    *("HF_*", "WANDB_*", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Names, or patterns of names, of the environment variables that a container gets."""

SYSTEM = tuple("/bin /dev /etc /lib /opt /proc /root /run /sbin /sys /tmp /usr /var".split())
"""Folders that an image has of its own."""

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Mount:
    """A file or folder of this machine, and its place in the container; both absolute."""

    source: str
    target: str
    read_only: bool = False

    @property
    def text(self) -> str:
        """``SOURCE:TARGET``, with ``:ro`` after it if the container may only read."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a container: every one, a number of them, or those of ``devices``."""

    every: bool = False
    count: int = 0
    devices: tuple[str, ...] = ()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Numbers or UUIDs of certain GPUs, the first ones if a number of them is meant."""
        return self.devices or tuple(map(str, range(self.count)))

    @property
    def wanted(self) -> bool:
        return self.every or bool(self.chosen)


class ContainerUser(NamedTuple):
    """Who runs the command and owns what it writes."""

    uid: int
    gid: int
    name: str


@dataclass(frozen=True)
class ContainerJob:
    """A command in a container.

    Attributes:
        image: its name and tag, or the path of a file.
        words: what runs in it.
        mounts: what it sees of this machine.
        workdir: the folder in the container where it starts.
        passed: names of the variables that keep the value that they have here.
        environment: variables with values of their own.
        shm_size: of /dev/shm, as docker writes it (8g); None where none was given.
        network: as docker names it.
        user: None for root of the container.
        terminal: whether the command reads from a terminal.
        options: further words for the runtime.
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
    """Reads ``SOURCE[:TARGET[:ro]]``; the target is the source's own path unless given.

    Raises:
        ConfigError: the source does not exist, the target is not absolute, or the form is wrong.
    """
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
    """The mounts, each once; ConfigError if two sources have the same place in the container."""
    found: dict[str, Mount] = {}
    for mount in mounts:
        other = found.setdefault(mount.target, mount)
        if other.source != mount.source:
            raise ConfigError(
                f"--mount {mount.text}: {other.source} is mounted at {mount.target} already; "
                "give one of them another place in the container"
            )
        if mount.read_only:
            found[mount.target] = mount
    return tuple(found.values())


def parse_gpus(text: str) -> Gpus:
    """Reads ``all``, ``none``, a number of GPUs, or ``device=0,2``, as docker does."""
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
    """The variables of :data:`PASSED` that are set here.

    CUDA_VISIBLE_DEVICES numbers the GPUs of this machine, so it is left out where the container
    has only some of them, which have other numbers there.
    """
    names = (name for name in environment if any(fnmatchcase(name, p) for p in PASSED))
    renumbered = () if gpus.every else ("CUDA_VISIBLE_DEVICES",)
    return tuple(sorted(name for name in names if name not in renumbered))


def parse_environment(
    entries: Iterable[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Splits ``NAME`` and ``NAME=VALUE`` into names to pass on, and values.

    Raises:
        ConfigError: a name is malformed, or is to be passed on and not set here.
    """
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
    """The absolute path of a wheel of this project or of a package for it; ConfigError for a file
    that is none, or that is OneFlow's framework."""
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
    """The words that run a command line in the container's shell, an interactive shell if it is
    None.

    Args:
        source: a checkout, mounted at its own path, whose modules come before the image's.
        wheel: a wheel, mounted at its own path, that is installed for this container alone,
            without what it requires: the image has that.
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
    # exec: signals for the container reach the command. It is a word of its own, so that it is
    # quoted once and can be read in the printed line.
    last, words = ("exec bash", ()) if cmd is None else ('exec bash -c "$0"', (cmd,))
    return ("bash", "-c", "; ".join([*steps, last]), *words)


def unmounted_paths(cmd: str, mounts: Sequence[Mount]) -> list[str]:
    """Absolute paths in a command line that this machine has, or whose folder it has, and that the
    container does not see."""
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
