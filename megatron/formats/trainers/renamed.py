"""Base class for reading other trainers' checkpoints, which presents their tensors under the names
of a Hugging Face model.

A reader is a :class:`TrainerFolder`. It defines the equivalent config.json, and maps the tensors in
the trainer's files to Hugging Face names; the table of that architecture does the rest.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_bytes, read_json
from megatron.config import ModelConfig
from megatron.formats.features import buffers_of
from megatron.formats.generation_settings import read_generation
from megatron.formats.huggingface.source import HuggingFaceFolder

CONFIG = "config.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names for Adam's moments."""


@dataclass(frozen=True)
class FileTensor:
    """Tensor in a file, which is read only when needed."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def changed(self, change: Callable[[Tensor], Tensor]) -> FileTensor:
        """Return the tensor with ``change`` applied on reading, such as a slice or another row
        order. Raises CheckpointError if the tensor's shape does not permit the change."""
        try:
            shape = tuple(change(torch.empty(self.shape, device="meta")).shape)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{self.path}: a tensor {self.shape}: {reason}") from None
        return replace(self, shape=shape, read=lambda: change(self.read()).contiguous())

    def rows(self, start: int, end: int) -> FileTensor:
        """Return rows ``start`` to ``end - 1``. Raises CheckpointError if the tensor has too
        few."""
        if self.shape and self.shape[0] < end:
            raise CheckpointError(f"{self.path}: a tensor {self.shape} has fewer than {end} rows")
        return self.changed(lambda values: values[start:end])


class FileTensors:
    """Tensors by Hugging Face name, with the interface of
    :class:`~megatron.formats.huggingface.weight_files.WeightFiles`."""

    def __init__(self, path: Path, stored: Mapping[str, FileTensor]) -> None:
        self.path, self._stored = path, dict(stored)
        self.files = {name: each.path for name, each in self._stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        return self._stored[name].dtype

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in its file's dtype."""
        values = self._stored[name].read()
        if tuple(values.shape) != self._stored[name].shape:
            raise CheckpointError(
                f"{self.files[name]}: {name} has the shape {tuple(values.shape)}, not "
                f"{self._stored[name].shape}"
            )
        return values


class TrainerStates(NamedTuple):
    """Optimizer state: tensors by kind and by the weight's Hugging Face name, and counters as in
    :attr:`Source.state`. ``scheduler`` is the learning rate schedule's step; None if not stored."""

    tensors: Mapping[str, Mapping[str, FileTensor]]
    counters: Mapping[str, int]
    scheduler: int | None = None


class TrainerFolder(HuggingFaceFolder):
    """Another trainer's checkpoint, read with the table of a Hugging Face architecture. If it has
    Adam's moments for every weight, training can continue from them."""

    read_by_transformers = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._moments: dict[str, FileTensors] = {}
        states = self._list_states(self._whole)
        reason = self._unusable(states) if isinstance(states, TrainerStates) else states
        if reason is not None:
            self.notes = (*self.notes, f"weights only: {reason}")
        elif isinstance(states, TrainerStates):
            path = self._weights.path
            self._moments = {kind: FileTensors(path, states.tensors[kind]) for kind in MOMENTS}
            self._continue(states)

    @abstractmethod
    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        """Return the file that lists the tensors, and the tensors by Hugging Face name. ``content``
        is the parsed config.json."""

    def _list_states(self, content: Mapping[str, Any]) -> TrainerStates | str | None:
        """Return the optimizer state, or a message why it cannot be used. Return None if the folder
        has no state in a supported form."""
        return None

    def _unusable(self, states: TrainerStates) -> str | None:
        """Return why the moments cannot be used, or None if they can. Reasons are states of other
        kinds, a weight without moments, and a weight whose values are converted when read. Raises
        CheckpointError if a moment's shape differs from its weight's."""
        if other := sorted(states.tensors.keys() - {*MOMENTS}):
            return f"its optimizer has {', '.join(other)}, which is not Adam's state"
        for name in self._trained():
            parameter = self._parameters[name]
            for kind in MOMENTS:
                for theirs in (self._stored[each] for each in parameter.theirs):
                    each = states.tensors.get(kind, {}).get(theirs)
                    if each is None:
                        return f"no {kind} of {theirs} is stored"
                    if each.shape != self._weights.shape(theirs):
                        raise CheckpointError(
                            f"{each.path}: {kind} of {theirs} has the shape {each.shape}; the "
                            f"weight has {self._weights.shape(theirs)}"
                        )
            shapes = [self._weights.shape(self._stored[each]) for each in parameter.theirs]
            if len(shapes) == 1 and len(shapes[0]) > 1:
                continue  # only vectors, in norms and recurrences, are converted
            for value in (0.0, 1.0):
                if bool((parameter.from_hf(torch.full(s, value) for s in shapes) != value).any()):
                    return f"{name} is another number than {parameter.theirs[0]}"
        return None

    def _continue(self, states: TrainerStates) -> None:
        step, scheduler = states.counters["iteration"], states.scheduler
        self.state = {**states.counters, "loss_scaler": {}}
        if not states.counters["consumed_samples"]:
            note = "it does not say how many samples it has seen: data begin with the first"
            self.notes = (*self.notes, note)
        if scheduler not in (None, step):
            note = f"its learning-rate schedule is at step {scheduler}, and its run at {step}"
            self.notes = (*self.notes, f"{note}; here the rate is that of {step}")

    def _trained(self) -> list[str]:
        frozen = buffers_of(self.model)
        return [name for name in self._parameters if name not in frozen]

    def kinds(self, name: str) -> Sequence[str]:
        kinds = super().kinds(name)
        return kinds if name in buffers_of(self.model) else (*kinds, *self._moments)

    def dtype(self, name: str, kind: str = "weight") -> str:
        if kind not in self._moments:
            return super().dtype(name, kind)
        first = self._parameter(name).theirs[0]
        return str(self._moments[kind].dtype(self._stored[first])).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        if kind not in self.kinds(name) or kind == "weight":
            return super().tensor(name, kind)
        parameter, moment = self._parameter(name), self._moments[kind]
        return parameter.from_hf(moment.tensor(self._stored[t]).float() for t in parameter.theirs)

    def _open_weights(self, content: dict[str, Any]) -> FileTensors:
        return FileTensors(*self._list(content))

    @classmethod
    def family(cls, folder: Path) -> str:
        return ModelConfig.family

    @property
    def generation(self) -> dict[str, Any]:
        """See :attr:`Source.generation`. Defaults are those of the model type in config.json."""
        known = self._config.name == CONFIG and config_near(self._config.parent, 0)
        model_type = self.architecture.model_type if known else None
        return read_generation(self._config.parent, self.model.vocabulary.size, model_type)


def config_near(folder: Path, steps: int = 2) -> Path | None:
    """Return the Hugging Face config.json in a folder or up to ``steps`` folders above it, or
    None."""
    for place in (folder, *list(folder.parents)[:steps]):
        path = place / CONFIG
        if path.is_file():
            content = read_json(path, lenient=True)
            if isinstance(content, dict) and "model_type" in content:
                return path
    return None


def yaml_of(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file. Only numbers, strings and containers are constructed.
    Raises CheckpointError if the file is missing or has no settings."""
    try:
        content = yaml.safe_load(read_bytes(path))
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{path} is not YAML: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} has no settings by name")
    return content


class Settings:
    """Another trainer's settings, whose types are checked when they are read. Raises
    CheckpointError if a setting is wrong. The message names the file and the setting."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self.content, self.path, self._read = content, path, set[str]()

    def whole(self, name: str, default: int | None = None) -> int:
        """Return the value of a setting, which must be a positive integer."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return the value of a setting, which must be a positive number."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return the value of a setting, which must be a boolean."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or ``default`` if it is missing or null."""
        self._read.add(name)
        value = self.content.get(name)
        return default if value is None else value

    def refuse(self, harmless: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a setting has not been read, unless it is unset or has its value
        in ``harmless``, where ... means any value."""
        for name, value in self.content.items():
            if name in self._read or value in (None, False, 0, "") or value in ([], {}):
                continue
            if name not in harmless or harmless[name] not in (value, ...):
                raise CheckpointError(
                    f"{self.path}: {name} is {value!r:.80}, which cannot be represented"
                )

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Return the error for a setting with a wrong value."""
        value = self.content.get(name)
        return CheckpointError(f"{self.path}: {name} is {value!r:.80}, expected {expected}")


def tensors_of(path: Path, content: Any) -> dict[str, FileTensor]:
    """Return the tensors in a file's content by name. Raises CheckpointError if it has other
    values."""
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} does not contain tensors by name")
    return {
        name: FileTensor(path, tuple(value.shape), value.dtype, value.detach)
        for name, value in content.items()
    }


def renamed(
    stored: Mapping[str, FileTensor], names: Mapping[str, str], path: Path
) -> dict[str, FileTensor]:
    """Return the tensors by Hugging Face name. ``names`` maps the trainer's names to these, with
    ``{}`` for a block's index. Raises CheckpointError for an unknown name."""
    result = {}
    for name, each in stored.items():
        block = re.search(r"\.(\d+)\.", name)
        template = name if block is None else name.replace(block[0], ".{}.", 1)
        if template not in names:
            raise CheckpointError(f"{path}: {name} is not a known tensor of such a model")
        theirs = names[template]
        result[theirs if block is None else theirs.format(block[1])] = each
    return result


def halves_from_pairs(values: Tensor, heads: int) -> Tensor:
    """Reorder the rows [heads D, ...] of queries or keys for Hugging Face's RoPE, which rotates
    channels i and i + D/2 of a head together instead of 2i and 2i + 1."""
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


LLAMA_KEYS: Mapping[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02,
}  # fmt: skip
"""Keys of config.json that the Llama models of all these trainers share."""
