"""Read the files of a DeepSpeed engine's checkpoint folder, and find slices of parameters in them.

::

    mp_rank_<M>_model_states.pt                        stages 0 to 2, a file per model-parallel rank
    [bf16_]zero_pp_rank_<D>_mp_rank_<M>_model_states.pt                                    stage 3
    [bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt          stages 1 to 3, per data rank D too
    layer_<L>-model_<T>-model_states.pt                  a pipeline's layer on tensor rank T
    layer_<L>_expert_<E>_mp_rank_<M>_model_states.pt            expert E of the L-th layer of them
    expert_<E>_mp_rank_<M>_model_states.pt           the form before that, expert E of all layers
    expp_rank_<X>_mp_rank_<M>_optim_states.pt      stage 0 with experts, of expert rank X; not read

Model-parallel ranks are numbered with tensor ranks fastest, then pipeline stages. ZeRO stores
parameters as slices of flat groups. At stages 1 and 2 ``param_slice_mappings`` (DeepSpeed 0.7.1 and
later) lists the slices; at stage 3 they follow from ``param_shapes``.

Expert files number experts globally. ZeRO's files number them within a rank: ranks along the expert
axis have different experts, and ranks with the same experts share their flat groups.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.formats.universal_info import BUFFERS
from megatron.formats.unpickle import load_pickle

_MODEL = re.compile(r"(?:(?:(?:bf|fp)16_)?zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(?:bf|fp)16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_DATA_RANK = re.compile(r"zero_pp_rank_\d+_")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d+)_model_states\.pt")
_NUMBERED = re.compile(r"(\.deepspeed_experts\.)(\d+)(?=\.)")
"""Index of an expert in a parameter name."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names in torch of the optimizer states that are read."""


class FlatSlice(NamedTuple):
    """Slice of a parameter: ``length`` elements from ``start`` in a flat group of a data rank."""

    data_rank: int
    group: int
    start: int
    length: int


class EngineFiles:
    """Files in one checkpoint folder, opened on demand. ``layers`` has a pipeline's layer files, by
    index in the layer list and tensor rank. Raises CheckpointError if files are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[int, Path] = {}
        self._optimizers: dict[int, dict[int, Path]] = {}
        self.layers: dict[int, dict[int, Path]] = {}
        self._expert_files: dict[int, list[Path]] = {}
        for path in sorted(folder.iterdir()):
            if match := _MODEL.fullmatch(path.name):
                self._models[int(match[1])] = path
            elif match := _OPTIMIZER.fullmatch(path.name):
                self._optimizers.setdefault(int(match[2]), {})[int(match[1])] = path
            elif match := _LAYER.fullmatch(path.name):
                self.layers.setdefault(int(match[1]), {})[int(match[2])] = path
            elif match := _EXPERT.fullmatch(path.name):
                self._expert_files.setdefault(int(match[1]), []).append(path)
        self._open = lru_cache(maxsize=None)(load_pickle)
        self._slices = cache(self._find_slices)
        self._expert_weights, self._weights = cache(self._experts), cache(self._module)
        self._experts_here = cache(self._count_experts)
        for what, ranks in (
            ("model states", set(self._models)), ("optimizer states", set(self._optimizers)),
        ):  # fmt: skip
            if sorted(ranks) != list(range(len(ranks))):
                missing = min(set(range(max(ranks))) - ranks)
                raise CheckpointError(f"{folder} has no {what} of model-parallel rank {missing}")
        if not self._models:
            raise CheckpointError(f"{folder} has no model states")
        if self._optimizers and len(self._optimizers) != len(self._models):
            raise CheckpointError(
                f"{folder} has model states of {len(self._models)} model-parallel ranks and "
                f"optimizer states of {len(self._optimizers)}"
            )
        with _refusing(folder):
            self._check_data_ranks()
            self.tensor_size, self.pipeline_size = self._sizes()
            self._refuse_round_robin()

    def _check_data_ranks(self) -> None:
        size = self._data_size()
        for files in self._optimizers.values():
            path = next(iter(files.values()))
            for data_rank in range(size or max(files) + 1):
                if data_rank not in files:
                    name = _DATA_RANK.sub(f"zero_pp_rank_{data_rank}_", path.name)
                    raise CheckpointError(
                        f"{self.folder} has no {name}, the optimizer states of data rank "
                        f"{data_rank}{f' of {size}' if size else ''}"
                    )
            if size and max(files) >= size:
                raise CheckpointError(
                    f"{files[max(files)]} is of another save: this one has {size} data ranks; "
                    "move such files away"
                )

    def _data_size(self) -> int | None:
        if not self._optimizers:
            return None
        state = self._zero(0, min(self._optimizers[0]))
        counts = state.get("partition_count")
        if isinstance(counts, Sequence):
            # One partition count per parameter group, since groups of experts have fewer replicas.
            mappings = state.get("param_slice_mappings") or [{}] * len(counts)
            others = [
                int(count)
                for count, mapping in zip(counts, mappings, strict=True)
                if not any(map(_NUMBERED.search, mapping))
            ]
            counts = max(others, default=None)
        size = self.model_states().get("dp_world_size") if counts is None else counts
        return None if size is None else int(size)

    def _sizes(self) -> tuple[int, int]:
        known = self.model_states().get("checkpoint_parallel_dimensions")
        if isinstance(known, dict):
            tensor, pipeline = int(known["tp_degree"]), int(known["pp_degree"])
        else:
            tensor = max((len(ranks) for ranks in self.layers.values()), default=len(self._models))
            pipeline = len(self._models) // tensor
        if tensor * pipeline != len(self._models):
            raise CheckpointError(
                f"{self.folder} has {len(self._models)} files of model states for {tensor} tensor "
                f"x {pipeline} pipeline ranks"
            )
        for layer, ranks in self.layers.items():
            if sorted(ranks) != list(range(tensor)):
                raise CheckpointError(
                    f"{self.folder} has layer {layer} of {len(ranks)} of {tensor} tensor ranks"
                )
        return tensor, pipeline

    def _refuse_round_robin(self) -> None:
        config = self.model_states().get("ds_config")
        zero = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
        if zero.get("round_robin_gradients") and len(self._optimizers.get(0, {})) > 1:
            raise CheckpointError(
                f"{self.folder} was saved with round_robin_gradients, with which DeepSpeed writes "
                "a wrong param_slice_mappings; save it again without"
            )

    def model_states(self, rank: int = 0) -> dict[str, Any]:
        """Return the model states of a model-parallel rank, including the training script's client
        state."""
        return self._dict(self._models[rank])

    def _dict(self, path: Path) -> dict[str, Any]:
        content = self._open(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is not a dictionary")
        return content

    def _zero(self, rank: int, data_rank: int) -> dict[str, Any]:
        path = self._optimizers[rank][data_rank]
        content = self._dict(path).get("optimizer_state_dict")
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} has no optimizer_state_dict")
        return content

    def _find_slices(self, rank: int) -> dict[str, list[FlatSlice]]:
        """Return the slices of each parameter of a model-parallel rank, by the folder's name for
        it."""
        by_name: dict[str, list[FlatSlice]] = {}
        files = self._optimizers.get(rank, {})
        for data_rank in sorted(files):
            state = self._zero(rank, data_rank)
            if "fp32_flat_groups" in state:
                slices = self._stage_3(rank, data_rank, len(files), state)
            elif "param_slice_mappings" in state:
                slices = (
                    (name, FlatSlice(data_rank, group, int(each.start), int(each.numel)))
                    for group, mapping in enumerate(state["param_slice_mappings"])
                    for name, each in mapping.items()
                )
            else:
                raise CheckpointError(
                    f"{files[data_rank]} has no param_slice_mappings: it was saved by DeepSpeed "
                    "before 0.7.1, or by an optimizer that is not ZeRO's"
                )
            with _refusing(files[data_rank]):
                for name, each in slices:
                    by_name.setdefault(self._of_all(name, rank, each, state), []).append(each)
        return by_name

    def _of_all(self, name: str, rank: int, place: FlatSlice, state: Mapping[str, Any]) -> str:
        """Return a parameter name with its local expert index replaced by the global one."""
        match = _NUMBERED.search(name)
        if match is None:
            return name
        here = self._experts_here(rank)[_NUMBERED.sub(r"\1", name)]
        # Experts that are not tensor-parallel are also distributed over tensor ranks.
        args = vars(self.model_states().get("args") or Namespace())
        spread = 1 if args.get("enable_expert_tensor_parallelism") else self.tensor_size
        copies = int(state["partition_count"][place.group])
        number = place.data_rank * spread + (rank % self.tensor_size if spread > 1 else 0)
        number = number % (len(self._optimizers[rank]) * spread // copies) * here + int(match[2])
        return f"{name[: match.end(1)]}{number}{name[match.end() :]}"

    def _count_experts(self, rank: int) -> Counter[str]:
        """Return the number of experts on a rank, by parameter name without the expert's index."""
        return Counter(_NUMBERED.sub(r"\1", name) for name in self._shapes(rank))

    def _stage_3(
        self, rank: int, data_rank: int, size: int, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, FlatSlice]]:
        groups = state.get("ds_zero_partition_groups") or []
        for group, shapes in enumerate(self.model_states(rank)["param_shapes"]):
            known = groups[group] if group < len(groups) else {}
            count = known.get("partition_count", size)
            place = known.get("partition_rank", data_rank)
            start = 0
            for name, shape in shapes.items():
                whole = math.prod(shape)
                part = -(-whole // count)
                length = max(0, min(part, whole - place * part))
                yield name, FlatSlice(data_rank, group, start, length)
                start += part

    def _shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters in a model-parallel rank's ZeRO files, by the
        folder's name for each."""
        groups = self.model_states(rank).get("param_shapes") or []
        groups = [groups] if isinstance(groups, Mapping) else groups
        return {name: tuple(shape) for shapes in groups for name, shape in shapes.items()}

    def shapes_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that the optimizer of a model-parallel rank updates.
        Raises CheckpointError if they are malformed."""
        try:
            return self._shapes(rank)
        except (TypeError, ValueError, AttributeError):
            raise CheckpointError(f"{self._models[rank]}: param_shapes is malformed") from None

    def names(self) -> list[str]:
        """Return the folder's names for all parameters. In a layer file, they start with the
        layer's index in the pipeline's list."""
        by_name: dict[str, None] = {}
        for rank in range(len(self._models)):
            with _refusing(self._models[rank]):
                by_name |= dict.fromkeys([*self._slices(rank), *self._weights(rank)])
                by_name |= dict.fromkeys(self._expert_weights(rank))
        for place in sorted(self.layers):
            by_name |= {f"{place}.{key}": None for key in self._dict(self.layers[place][0])}
        return list(by_name)

    def _module(self, rank: int) -> Mapping[str, Tensor]:
        states = self.model_states(rank)
        parts = [states.get("module"), states.get(BUFFERS)]
        return {k: v for part in parts if isinstance(part, Mapping) for k, v in _flat(part).items()}

    def _experts(self, rank: int) -> dict[str, Path]:
        """Return the file of each expert parameter of a model-parallel rank, by parameter name."""
        files = self._expert_files.get(rank, ())
        return {name: path for path in files for name in self._dict(path)}

    def shares(
        self, name: str, kind: str, registered: Callable[[int, str], str]
    ) -> list[Tensor] | None:
        """Return each tensor rank's shard of a parameter, or of its moment ``kind``. Return None if
        the folder has none. ``registered`` converts a layer's index and a key in its file to a
        parameter name. Raises CheckpointError if the ZeRO files lack elements of the parameter."""
        with _refusing(self.folder, f"{kind} of {name}"):
            parts = [self._share(each, name, kind) for each in range(self.tensor_size)]
        shares = [share for share in parts if share is not None]
        # An expert without tensor parallelism is on one tensor rank, or on all.
        if len(shares) == len(parts) or (shares and _NUMBERED.search(name)):
            return shares
        if kind == "weight":
            for place, files in self.layers.items():
                for key in self._dict(files[0]):
                    if registered(place, key) == name:
                        return [self._dict(files[rank])[key] for rank in range(self.tensor_size)]
        return None

    def _share(self, tensor_rank: int, name: str, kind: str) -> Tensor | None:
        for stage in range(self.pipeline_size):
            rank = stage * self.tensor_size + tensor_rank
            slices = self._slices(rank).get(name)
            if slices:
                pieces = [self._read(rank, each, kind) for each in slices if each.length]
                if any(piece is None for piece in pieces):
                    return None
                flat = torch.cat([piece.float() for piece in pieces if piece is not None])
                return self._shaped(rank, name, flat)
            numbered = _NUMBERED.search(name)
            # Each rank numbers its experts from 0, and has an expert 0 if it has any.
            shown = _NUMBERED.sub(r"\g<1>0", name)
            if rank in self._optimizers and shown in self._shapes(rank):
                if numbered:  # the expert is on another tensor rank
                    continue
                # The module's weights are no substitute: they are a half-precision copy, unless
                # they are frozen.
                raise CheckpointError(
                    f"{self.folder}: {name} is in none of the ZeRO files of model-parallel rank "
                    f"{rank}, whose optimizer updates it"
                )
            # At stage 0 the optimizer state is indexed by parameter number. Older saves lack the
            # names.
            order = list(self.model_states(rank).get("optimizer_parameters", ()))
            if name in order:
                values = self._numbered(rank, order.index(name), kind)
                if values is not None or kind != "weight":
                    return values
            if kind == "weight" and name in self._weights(rank):
                return self._weights(rank)[name]
            if kind == "weight" and name in self._expert_weights(rank):
                return self._dict(self._expert_weights(rank)[name])[name]
        return None

    def _numbered(self, rank: int, number: int, kind: str) -> Tensor | None:
        """Return the moment of parameter ``number`` at stage 0. For ``weight``, return its float32
        master weight, which exists only with fp16, or None."""
        optimizer = self.model_states(rank)["optimizer"]
        if kind == "weight":
            mains = [main for group in optimizer.get("fp32_groups", ()) for main in group]
            return mains[number] if mains else None
        return _unpartitioned_state(optimizer).get(number, {}).get(kind)

    def _shaped(self, rank: int, name: str, flat: Tensor) -> Tensor:
        shape = self._shapes(rank).get(_NUMBERED.sub(r"\g<1>0", name))
        if shape is None:
            return flat
        if flat.numel() != math.prod(shape):
            raise CheckpointError(
                f"{self.folder}: {name} has {flat.numel()} of {math.prod(shape)} elements in the "
                f"ZeRO files of model-parallel rank {rank}"
            )
        return flat.view(shape)

    def _read(self, rank: int, wanted: FlatSlice, kind: str) -> Tensor | None:
        path = self._optimizers[rank][wanted.data_rank]
        state = self._zero(rank, wanted.data_rank)
        if kind == "weight":
            groups = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))
            values = groups[wanted.group] if groups and wanted.group < len(groups) else None
        else:
            values = _group_state(state, wanted.group).get(kind)
        if not isinstance(values, Tensor):
            if kind == "weight":
                raise CheckpointError(f"{path} has no float32 weights of group {wanted.group}")
            return None
        end = wanted.start + wanted.length
        if values.numel() < end:
            raise CheckpointError(
                f"{path}: {kind} of group {wanted.group} has {values.numel()} elements, and should "
                f"have {end} or more"
            )
        return values.reshape(-1)[wanted.start : end]

    def _first_state(self) -> Mapping[str, Any]:
        """Return the optimizer state of the first group, or at stage 0 of the first parameter."""
        if self._optimizers:
            return _group_state(self._zero(0, 0), 0)
        optimizer = self.model_states().get("optimizer")
        if not isinstance(optimizer, Mapping) or "optimizer_parameters" not in self.model_states():
            return {}
        return next(iter(_unpartitioned_state(optimizer).values()), {})

    def moments(self) -> list[str]:
        """Return the members of :data:`MOMENTS` that the folder contains."""
        state = self._first_state()
        return [kind for kind in MOMENTS if isinstance(state.get(kind), Tensor)]

    def optimizer_step(self) -> int:
        """Return the number of updates as counted by the optimizer, or 0 if it does not count."""
        step = self._first_state().get("step")
        if step is None and self._optimizers:
            state = self._zero(0, 0)
            inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
            groups = inner.get("param_groups", [{}]) if isinstance(inner, Mapping) else [{}]
            step = state.get("base_optimizer_state_step", groups[0].get("step", 0))
        return int(step or 0)


@contextmanager
def _refusing(path: Path, part: str = "its content") -> Iterator[None]:
    """Convert errors about unexpected types and values to a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{path}: {part} is malformed ({reason})") from None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten Megatron-DeepSpeed's nested module state to tensors with dotted keys."""
    flat: dict[str, Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _unpartitioned_state(optimizer: Mapping[str, Any]) -> Mapping[int, Any]:
    """Return the optimizer state at stage 0, by parameter number. In fp16 the optimizer is
    wrapped."""
    return optimizer.get("optimizer_state_dict", optimizer).get("state", {})


def _group_state(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    """Return the optimizer state of a flat group, at any stage."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    if isinstance(inner, Mapping):
        inner = inner.get("state", {})
        return inner.get(group, {})
    return inner[group] if group < len(inner) else {}
