"""The files of an old Megatron checkpoint: their paths, and the content of a rank's file.

::

    <load>/latest_checkpointed_iteration.txt         a number, or release
    <load>/iter_0000100/mp_rank_00/model_optim_rng.pt          tensor rank
    <load>/iter_0000100/mp_rank_00_001/model_optim_rng.pt      tensor and pipeline rank
    <load>/iter_0000100/mp_rank_00_001_002/...                 tensor, pipeline and expert rank
    <load>/iter_0000100/mp_rank_00_002/...                     or, in one stage, without the second
    <load>/release/mp_rank_00/model_optim_rng.pt

The file of a single rank can also be read by itself, wherever it was copied. A checkpoint in a zip
archive has a path like ``megatron_lm_345m_v0.0.zip/release``.

The optimizer numbers parameters by groups: first those with weight decay, which are matrices, then
norms and biases (or the reverse, if a pipeline stage registers a norm first), each in the order of
the model's dictionary. The file does not contain this numbering. Therefore everything possible is
checked: the sizes of groups, every shape, and in half-precision training that each float32 copy
rounds to the model's weight. If anything does not fit, the optimizer state is not used.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER
from megatron.formats.legacy_megatron.names import is_buffer
from megatron.formats.unpickle import load_pickle
from megatron.util.files import check_inflation, open_regular

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""Names that a rank's file may have. The second is used with a distributed optimizer."""
VERSIONS = (0.0, 1.0, 2.0, 3.0)
"""Values of ``checkpoint_version``, which determines the order of query-key-value rows."""

_ARCHIVE_ERRORS = (
    zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, ValueError, EOFError,
    zlib.error, lzma.LZMAError,
)  # fmt: skip
_LONGEST_TRACKER = 1 << 10
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_TAG = re.compile(r"release|iter_(\d+)")


class Rank(NamedTuple):
    """Coordinates of a process in the parallel layout that wrote a checkpoint."""

    pipeline: int
    tensor: int
    expert: int = 0


def iteration_folder(iteration: int | None) -> str:
    """Return Megatron's folder name for an iteration's checkpoint, which is ``release`` for
    None."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def rank_folder(rank: Rank, sizes: Rank) -> str:
    """Return Megatron's folder name for a rank. ``sizes`` has the number of ranks of each kind."""
    further = zip(rank[::2], sizes[::2], strict=True)
    return f"mp_rank_{rank.tensor:02d}" + "".join(f"_{n:03d}" for n, size in further if size > 1)


def find_megatron(path: Path, wanted: str | None) -> Path | None:
    """Return the checkpoint to read, or None if there are no checkpoints. ``wanted`` is
    ``release``, an iteration or ``iter_0000100``; None selects the newest. Raises CheckpointError
    if only others exist."""
    if path.name in MODEL_FILES and path.is_file():
        if _RANK.fullmatch(path.parent.name) is None:
            if wanted is not None:
                raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
            return path
        path = path.parent.parent
    archive, _ = split_archive(path)
    if archive is None and not path.is_dir():
        return None
    folders = {path / PurePosixPath(name).parent.parent for name in _model_files(path)}
    if not folders:
        return None
    checkpoints = {folder.name: folder for folder in folders if folder != path}
    if path in folders:
        if wanted not in (None, *_spellings(path.name)):
            raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
        return path
    if wanted is None:
        wanted = _named_by_tracker(folders)
    if wanted is None:
        numbers = {name: int(match[1] or -1) for name in checkpoints if (match := _TAG.match(name))}
        wanted = max(numbers, key=lambda name: numbers[name])
    for name, folder in checkpoints.items():
        if wanted in _spellings(name):
            return folder
    _missing(path, wanted, folders)


def split_archive(path: Path) -> tuple[Path | None, str]:
    """Return the zip archive that contains a path, or None, and the path within the archive."""
    for place in (path, *path.parents):
        if place.is_file() and zipfile.is_zipfile(place):
            inner = path.relative_to(place).as_posix()
            return place, "" if inner == "." else inner
        if place.exists():
            break
    return None, ""


def rank_files(folder: Path) -> dict[Rank, Path]:
    """Return a checkpoint's files by rank. The second number in a folder name is read as the
    pipeline rank. Raises CheckpointError if files are missing."""
    files: dict[Rank, Path] = {}
    names = _model_files(folder)
    if not names and folder.is_file():
        return {Rank(0, 0): folder}
    for name in sorted(names):
        inner = PurePosixPath(name)
        match = _RANK.fullmatch(inner.parent.name)
        if match is None or len(inner.parts) != 2:
            continue
        rank = Rank(int(match[2] or 0), int(match[1]), int(match[3] or 0))
        other = files.setdefault(rank, folder / name)
        if other.parent.name != inner.parent.name:
            raise CheckpointError(
                f"{folder}: {other.parent.name} and {inner.parent.name} are of one rank; move away "
                "the one of another checkpoint"
            )
    if not files:
        raise CheckpointError(f"{folder} has no mp_rank_00/{MODEL_FILES[0]}")
    return require_ranks(files, folder, layout_of(files))


def layout_of(ranks: Iterable[Rank]) -> Rank:
    """Return the number of ranks of each kind."""
    return Rank(*(max(numbers) + 1 for numbers in zip(*ranks, strict=True)))


def require_ranks(found: dict[Rank, Path], folder: Path, sizes: Rank) -> dict[Rank, Path]:
    """Return the files of a layout's ranks, in rank order. Raises CheckpointError if one is
    missing."""
    wanted = list(starmap(Rank, product(*map(range, sizes))))
    for rank in wanted:
        if rank not in found:
            name = rank_folder(rank, sizes)
            raise CheckpointError(f"{folder / name / MODEL_FILES[0]} is missing")
    return {rank: found[rank] for rank in wanted}


def _load(path: Path) -> Any:
    archive, inner = split_archive(path)
    if archive is None or not inner:
        return load_pickle(path)
    # Torch seeks in the file and maps it, which is impossible in an archive, so unpack it to a
    # temporary file, which exists as long as it is mapped.
    try:
        with zipfile.ZipFile(archive) as opened, tempfile.NamedTemporaryFile() as file:
            member = opened.getinfo(inner)
            check_inflation(member.compress_size, member.file_size, str(path))
            with opened.open(member) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            return load_pickle(Path(file.name), str(path))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be unpacked into {tempfile.gettempdir()} (TMPDIR names another "
            f"folder): {error}"
        ) from None
    except _ARCHIVE_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read from the archive: {error}") from None


def _model_files(path: Path) -> list[str]:
    """Return the paths, relative to ``path``, of the rank files of the checkpoints that it
    contains."""
    archive, inner = split_archive(path)
    if archive is None:
        names = [
            each.relative_to(path).as_posix()
            for file in MODEL_FILES
            for pattern in (f"mp_rank_*/{file}", f"*/mp_rank_*/{file}")
            for each in path.glob(pattern)
        ]
    else:
        prefix = f"{inner}/" if inner else ""
        try:
            with zipfile.ZipFile(archive) as opened:
                members = opened.namelist()
        except (OSError, *_ARCHIVE_ERRORS) as error:
            raise CheckpointError(f"{archive} is a damaged archive: {error}") from None
        names = [name.removeprefix(prefix) for name in members if name.startswith(prefix)]
    return [name for name in names if _is_model_file(PurePosixPath(name))]


def _is_model_file(name: PurePosixPath) -> bool:
    if name.is_absolute() or ".." in name.parts or name.name not in MODEL_FILES:
        return False
    if len(name.parts) < 2 or _RANK.fullmatch(name.parts[-2]) is None:
        return False
    return len(name.parts) == 2 or _TAG.fullmatch(name.parts[-3]) is not None


def _named_by_tracker(found: set[Path]) -> str | None:
    """Return the checkpoint that the tracker file names, or None without a tracker file."""
    for root in {folder.parent for folder in found}:
        tracker = root / MEGATRON_TRACKER
        archive, inner = split_archive(tracker)
        try:
            if archive is not None:
                with zipfile.ZipFile(archive) as opened, opened.open(inner) as member:
                    text = member.read(_LONGEST_TRACKER).decode(errors="replace")
            else:
                with open_regular(tracker) as file:
                    text = file.read(_LONGEST_TRACKER).decode(errors="replace")
        except (FileNotFoundError, KeyError):
            continue
        except (OSError, *_ARCHIVE_ERRORS) as error:
            raise CheckpointError(f"{tracker} cannot be read: {error}") from None
        named = text.strip()
        if not (named == "release" or named.isdecimal()):
            raise CheckpointError(f"{tracker} has {named!r}; expected a number or release")
        if not any(named in _spellings(folder.name) for folder in found):
            _missing(tracker, named, found)
        return named
    return None


def _spellings(name: str) -> tuple[str, ...]:
    """Return the values of ``wanted`` that select the checkpoint with this folder name."""
    match = _TAG.fullmatch(name)
    if match is None or match[1] is None:
        return (name,)
    number = str(int(match[1]))
    return name, match[1], number, f"global_step{number}"


def _missing(where: Path, wanted: str | None, found: set[Path]) -> NoReturn:
    names = ", ".join(sorted(folder.name for folder in found))
    raise CheckpointError(f"{where}: there is no checkpoint {wanted}; there are {names}")


@dataclass(frozen=True)
class RankFile:
    """Content of a rank's file. ``iteration`` is None for released models. ``arguments`` are empty
    if the file has none. ``chunks`` has each virtual pipeline stage's parameters, by Megatron's
    names with all levels joined by dots."""

    path: Path
    version: float
    iteration: int | None
    arguments: Mapping[str, Any]
    chunks: tuple[Mapping[str, Tensor], ...]
    optimizer: Any

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Read a rank's file. Raises CheckpointError if it is damaged or has another format."""
        content = _load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is not a dictionary")
        version = content.get("checkpoint_version", 0)
        if isinstance(version, bool) or version not in VERSIONS:
            raise CheckpointError(f"{path} has checkpoint_version {version!r}; expected 0 to 3")
        iteration = content.get("iteration", content.get("total_iters"))
        if iteration is not None and not isinstance(iteration, int):
            raise CheckpointError(f"{path}: iteration is {iteration!r}; expected an integer")
        arguments = content.get("args")
        if not isinstance(arguments, argparse.Namespace | None):
            raise CheckpointError(f"{path}: args are {type(arguments).__name__}, not a namespace")
        named = {} if arguments is None else vars(arguments)
        return cls(
            path,
            float(version),
            iteration,
            {  # Drop the tensors, which would keep the file mapped.
                name: f"a tensor of {tuple(v.shape)}" if isinstance(v, Tensor) else v
                for name, v in named.items()
            },
            tuple(_flat(content[key], path) for key in _chunk_keys(content, path)),
            content.get("optimizer"),
        )


def _chunk_keys(content: Mapping[str, Any], path: Path) -> list[str]:
    """Return the keys under which the file has the model's chunks: ``model``, or ``model0``,
    ``model1`` and so on."""
    if "model" in content:
        return ["model"]
    numbered = [
        key for key in content if isinstance(key, str) and key.removeprefix("model").isdecimal()
    ]
    keys = [f"model{number}" for number in range(len(numbered))]
    if not keys or set(keys) != set(numbered):
        raise CheckpointError(
            f"{path} has no model, nor model0, model1, ...; it has {', '.join(map(str, content))}"
        )
    return keys


def _flat(nested: Any, path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Flatten nested dictionaries. Return their tensors, by keys joined by dots."""
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: {prefix or 'model'} is not a dictionary")
    tensors: dict[str, Tensor] = {}
    for key, value in nested.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: {prefix or 'model'} has the key {key!r}, not a name")
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Tensor):
            if not is_buffer(name):
                tensors[name] = value.detach()
        elif isinstance(value, dict):
            tensors |= _flat(value, path, name)
        elif value is not None and not is_buffer(name):
            raise CheckpointError(f"{path}: {name} is {type(value).__name__}, not a tensor")
    return tensors


MOMENTS = ("exp_avg", "exp_avg_sq")

Key = tuple[int, str]
"""Index of a model chunk, and Megatron's name for a parameter in it."""

_COMPARED = 1024
"""Number of elements for which a weight is compared with its float32 copy."""


class UnusableError(Exception):
    """Raised for optimizer state that cannot be used. The weights are still loaded."""


def adam_state(
    optimizer: Any, chunks: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[Key, dict[str, Tensor]], int]:
    """Return each parameter's optimizer state, and Adam's number of steps. ``optimizer`` and
    ``chunks`` are from a :class:`RankFile`. The state is ``exp_avg``, ``exp_avg_sq`` and, if
    stored, the float32 ``weight``. Raises UnusableError if it is missing, belongs to another
    optimizer, or cannot be assigned to parameters unambiguously."""
    if not isinstance(optimizer, dict):
        raise UnusableError("there is no optimizer state")
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    if not isinstance(inner, dict) or not inner.get("state") or not inner.get("param_groups"):
        raise UnusableError("its optimizer state has another form than Adam's in one file per rank")
    states: dict[Key, dict[str, Tensor]] = {}
    steps: set[int] = set()
    groups = inner["param_groups"]
    for number, (group, keys) in enumerate(zip(groups, _assigned(groups, chunks), strict=True)):
        for place, (index, key) in enumerate(zip(group["params"], keys, strict=True)):
            weight, state = chunks[key[0]][key[1]], inner["state"].get(index)
            if not isinstance(state, dict):
                raise UnusableError(f"its optimizer state lacks that of {key[1]}")
            tensors = {}
            if masters is not None:
                tensors["weight"] = _master(masters, number, place, weight, key[1])
            for kind in MOMENTS:
                values = state.get(kind)
                if not isinstance(values, Tensor) or values.shape != weight.shape:
                    raise UnusableError(f"its {kind} of {key[1]} has another shape")
                tensors[kind] = values
            states[key] = tensors
            steps.add(_number(state.get("step", group.get("step"))))
    if len(steps) != 1:
        raise UnusableError("its optimizer does not say one number of steps")
    return states, steps.pop()


def _assigned(groups: Any, chunks: Sequence[Mapping[str, Tensor]]) -> Iterator[list[Key]]:
    """Yield the parameters of each group, in the optimizer's order. Raises UnusableError if groups
    do not consist of all matrices, or of all norms and biases."""
    decayed: list[Key] = []
    others: list[Key] = []
    for number, chunk in enumerate(chunks):
        for name, values in chunk.items():
            (decayed if values.ndim > 1 else others).append((number, name))
    sizes = [len(group["params"]) for group in groups if group["params"]]
    for order in ([decayed, others], [others, decayed]):
        filled = iter([keys for keys in order if keys])
        if sizes == [len(keys) for keys in order if keys] and _decay_agrees(groups, order, decayed):
            yield from (next(filled) if group["params"] else [] for group in groups)
            return
    raise UnusableError("its optimizer's groups are not those of matrices and of norms and biases")


def _decay_agrees(groups: Any, order: list[list[Key]], decayed: list[Key]) -> bool:
    """Return whether the groups' weight decay fits their parameters: matrices decay, norms and
    biases do not. A weight_decay of 0 without wd_mult fits matrices too."""
    filled = [group for group in groups if group["params"]]
    for group, keys in zip(filled, [keys for keys in order if keys], strict=True):
        factor = bool(group.get("wd_mult", group.get("weight_decay")))
        if factor != (keys is decayed) and ("wd_mult" in group or factor):
            return False
    return True


def _master(masters: Any, group: int, place: int, weight: Tensor, name: str) -> Tensor:
    """Return a weight's float32 copy. Raises UnusableError if it does not round to the weight."""
    try:
        values = masters[group][place]
    except (IndexError, TypeError, KeyError):
        raise UnusableError(f"its optimizer lacks the float32 copy of {name}") from None
    if not isinstance(values, Tensor) or values.shape != weight.shape:
        raise UnusableError(f"its float32 copy of {name} has another shape")
    part = values.detach().reshape(-1)[:_COMPARED].to(weight.dtype)
    if not torch.equal(part, weight.reshape(-1)[:_COMPARED]):
        raise UnusableError(f"its float32 copy of {name} is of other weights")
    return values.detach()


def _number(step: Any) -> int:
    """Return a number of steps as an integer. It may be stored as a tensor."""
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, int | float) and not isinstance(step, bool) and step == int(step):
        return int(step)
    raise UnusableError("its optimizer does not say how many steps it has done")
