"""The files of an engine's folder: who holds what of which parameter.

::

    mp_rank_<M>_model_states.pt                        stages 0 to 2, a file per model-parallel rank
    [bf16_]zero_pp_rank_<D>_mp_rank_<M>_model_states.pt                                    stage 3
    [bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt          stages 1 to 3, per data rank D too
    layer_<L>-model_<T>-model_states.pt                  a pipeline's layer on tensor rank T

Model-parallel ranks count tensor ranks fastest, then pipeline stages. ZeRO keeps parameters as runs
of flat groups; where which run lies is in ``param_slice_mappings`` at stages 1 and 2 (DeepSpeed
0.7.1 and later) and follows from ``param_shapes`` at stage 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.formats.unpickle import load_pickle

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_3 = re.compile(r"(?:(?:bf|fp)16_)?zero_pp_rank_0_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(?:bf|fp)16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_DATA_RANK = re.compile(r"zero_pp_rank_\d+_")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Run(NamedTuple):
    """A part of a parameter's share in a ZeRO file.

    Attributes:
        data_rank: whose file.
        group: number of the flat group there.
        start: first element in the group.
        length: number of elements.
    """

    data_rank: int
    group: int
    start: int
    length: int


class EngineFiles:
    """The files of one folder, opened when they are asked for.

    Args:
        folder: the folder.

    Attributes:
        tensor_size: tensor-parallel size of the run.
        pipeline_size: number of its pipeline ranks.
        layers: files of a pipeline's layers, by place in the list and tensor rank.

    Raises:
        CheckpointError: files are missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[int, Path] = {}
        self._optimizers: dict[int, dict[int, Path]] = {}
        self.layers: dict[int, dict[int, Path]] = {}
        for path in sorted(folder.iterdir()):
            if match := _MODEL.fullmatch(path.name) or _MODEL_3.fullmatch(path.name):
                self._models[int(match[1])] = path
            elif match := _OPTIMIZER.fullmatch(path.name):
                self._optimizers.setdefault(int(match[2]), {})[int(match[1])] = path
            elif match := _LAYER.fullmatch(path.name):
                self.layers.setdefault(int(match[1]), {})[int(match[2])] = path
        self._open = lru_cache(maxsize=None)(load_pickle)
        self._places = cache(self._find_places)
        found: tuple[tuple[str, Collection[int]], ...] = (
            ("model states of model-parallel rank", self._models),
            ("optimizer states of model-parallel rank", self._optimizers),
        )
        for what, ranks in found:
            if sorted(ranks) != list(range(len(ranks))):
                missing = min(set(range(max(ranks))) - set(ranks))
                raise CheckpointError(f"{folder} has no {what} {missing}")
        if not self._models:
            raise CheckpointError(f"{folder} has no model states")
        if self._optimizers and len(self._optimizers) != len(self._models):
            raise CheckpointError(
                f"{folder} has model states of {len(self._models)} model-parallel ranks and "
                f"optimizer states of {len(self._optimizers)}"
            )
        self._check_data_ranks()
        self.tensor_size, self.pipeline_size = self._sizes()
        self._refuse_round_robin()

    def _check_data_ranks(self) -> None:
        """Each model-parallel rank has an optimizer file of every data rank, and no other."""
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
        """Data-parallel size of the run by the files' own word; None where they do not say."""
        if not self._optimizers:
            return None
        counts = self._zero(0, min(self._optimizers[0])).get("partition_count")
        if isinstance(counts, Sequence):
            # One per parameter group; groups of experts are on fewer ranks.
            counts = max((int(count) for count in counts), default=None)
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
        """The model states of a model-parallel rank, with what the script saved beside them."""
        return self._dict(self._models[rank])

    @property
    def partitioned(self) -> bool:
        """Whether there are ZeRO files."""
        return bool(self._optimizers)

    def _dict(self, path: Path) -> dict[str, Any]:
        content = self._open(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no dictionary")
        return content

    def _zero(self, rank: int, data_rank: int) -> dict[str, Any]:
        path = self._optimizers[rank][data_rank]
        content = self._dict(path).get("optimizer_state_dict")
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} has no optimizer_state_dict")
        return content

    def _find_places(self, rank: int) -> dict[str, list[Run]]:
        """Where the parameters of a model-parallel rank lie, by its names."""
        found: dict[str, list[Run]] = {}
        files = self._optimizers.get(rank, {})
        for data_rank in files:
            state = self._zero(rank, data_rank)
            if "fp32_flat_groups" in state:
                runs = self._stage_3(rank, data_rank, len(files), state)
            elif "param_slice_mappings" in state:
                runs = _mapped(data_rank, state["param_slice_mappings"])
            else:
                raise CheckpointError(
                    f"{files[data_rank]} has no param_slice_mappings: it was saved by DeepSpeed "
                    "before 0.7.1, or by an optimizer that is not ZeRO's"
                )
            for name, run in runs:
                found.setdefault(name, []).append(run)
        return found

    def _stage_3(
        self, rank: int, data_rank: int, size: int, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Run]]:
        groups = state.get("ds_zero_partition_groups") or []
        for group, shapes in enumerate(self.model_states(rank)["param_shapes"]):
            known = groups[group] if group < len(groups) else {}
            count, place = (
                known.get("partition_count", size),
                known.get("partition_rank", data_rank),
            )
            start = 0
            for name, shape in shapes.items():
                whole = math.prod(shape)
                part = -(-whole // count)
                yield name, Run(data_rank, group, start, max(0, min(part, whole - place * part)))
                start += part

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters in the ZeRO files of a model-parallel rank, by its names."""
        groups = self.model_states(rank).get("param_shapes") or []
        groups = [groups] if isinstance(groups, Mapping) else groups
        return {name: tuple(shape) for shapes in groups for name, shape in shapes.items()}

    def names(self) -> list[str]:
        """All parameters by the folder's names; those of a layer file begin with its place in the
        pipeline's list."""
        found: dict[str, None] = {}
        for rank in range(len(self._models)):
            found |= dict.fromkeys(self._places(rank))
            found |= dict.fromkeys(self._module(rank))
        for place in sorted(self.layers):
            found |= {f"{place}.{key}": None for key in self._dict(self.layers[place][0])}
        return list(found)

    def _module(self, rank: int) -> Mapping[str, Tensor]:
        module = self.model_states(rank).get("module")
        return module if isinstance(module, Mapping) else {}

    def shares(
        self, name: str, kind: str, registered: Callable[[int, str], str]
    ) -> list[Tensor] | None:
        """A parameter's or a moment's share on each tensor rank; None when there is none.

        Args:
            name: the folder's name.
            kind: ``weight`` or a moment.
            registered: see :meth:`names`.

        Raises:
            CheckpointError: the ZeRO files should have it, and have none or only some of it.
        """
        found = [self._share(tensor_rank, name, kind) for tensor_rank in range(self.tensor_size)]
        if all(share is not None for share in found):
            return [share for share in found if share is not None]
        if kind == "weight":
            for place, files in self.layers.items():
                for key in self._dict(files[0]):
                    if registered(place, key) == name:
                        return [self._dict(files[rank])[key] for rank in range(self.tensor_size)]
        return None

    def _share(self, tensor_rank: int, name: str, kind: str) -> Tensor | None:
        for stage in range(self.pipeline_size):
            rank = stage * self.tensor_size + tensor_rank
            runs = self._places(rank).get(name)
            if runs:
                pieces = [self._run(rank, run, kind) for run in runs if run.length]
                if any(piece is None for piece in pieces):
                    return None
                flat = torch.cat([piece.float() for piece in pieces if piece is not None])
                return self._shaped(rank, name, flat)
            if name in self._updated(rank):
                # The module's weights are a half-precision copy: no replacement for these.
                raise CheckpointError(
                    f"{self.folder}: {name} is in none of the ZeRO files of model-parallel rank "
                    f"{rank}, whose optimizer updates it"
                )
            if kind == "weight" and name in self._module(rank):
                return self._module(rank)[name]
            if kind != "weight" and name in self._order(rank):
                return self._unpartitioned(rank, name, kind)
        return None

    def _updated(self, rank: int) -> Collection[str]:
        """Parameters that the ZeRO files of a model-parallel rank must have: not frozen ones, whose
        only copy is the module's."""
        return self.shapes(rank) if self._optimizers.get(rank) else ()

    def _shaped(self, rank: int, name: str, flat: Tensor) -> Tensor:
        shape = self.shapes(rank).get(name)
        if shape is None:
            return flat
        if flat.numel() != math.prod(shape):
            raise CheckpointError(
                f"{self.folder}: {name} has {flat.numel()} of {math.prod(shape)} elements in the "
                f"ZeRO files of model-parallel rank {rank}"
            )
        return flat.view(shape)

    def _run(self, rank: int, run: Run, kind: str) -> Tensor | None:
        state = self._zero(rank, run.data_rank)
        if kind == "weight":
            groups = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))
            values = groups[run.group] if groups is not None else None
        else:
            values = _group_state(state, run.group).get(kind)
        if not isinstance(values, Tensor):
            if kind == "weight":
                raise CheckpointError(
                    f"{self._optimizers[rank][run.data_rank]} has no float32 weights of group "
                    f"{run.group}"
                )
            return None
        if values.numel() < run.start + run.length:
            raise CheckpointError(
                f"{self._optimizers[rank][run.data_rank]}: {kind} of group {run.group} has "
                f"{values.numel()} elements, and should have {run.start + run.length} or more"
            )
        return values.reshape(-1).narrow(0, run.start, run.length)

    def _order(self, rank: int) -> Sequence[str]:
        """Names of the parameters in the order of an unpartitioned optimizer, where it is known."""
        return self.model_states(rank).get("optimizer_parameters", ())

    def _unpartitioned(self, rank: int, name: str, kind: str) -> Tensor | None:
        """A moment at stage 0."""
        optimizer = self.model_states(rank)["optimizer"]
        return optimizer["state"].get(list(self._order(rank)).index(name), {}).get(kind)

    def _first_state(self) -> Mapping[str, Any]:
        """The optimizer's state of the first group, or at stage 0 of the first parameter."""
        if self.partitioned:
            return _group_state(self._zero(0, 0), 0)
        optimizer = self.model_states().get("optimizer")
        if not isinstance(optimizer, Mapping) or "optimizer_parameters" not in self.model_states():
            return {}
        return next(iter(optimizer.get("state", {}).values()), {})

    def moments(self) -> list[str]:
        """The moments that there are."""
        state = self._first_state()
        return [kind for kind in _MOMENTS if isinstance(state.get(kind), Tensor)]

    def optimizer_step(self) -> int:
        """Number of updates by the optimizer's own count; 0 where it does not count."""
        step = self._first_state().get("step")
        if step is None and self.partitioned:
            state = self._zero(0, 0)
            inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
            groups = inner.get("param_groups", [{}]) if isinstance(inner, Mapping) else [{}]
            step = state.get("base_optimizer_state_step", groups[0].get("step", 0))
        return int(step or 0)


def _mapped(data_rank: int, mappings: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Run]]:
    """Runs by ``param_slice_mappings``: per group, name to start and numel."""
    for group, mapping in enumerate(mappings):
        for name, address in mapping.items():
            yield name, Run(data_rank, group, int(address.start), int(address.numel))


def _group_state(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    """The optimizer's state of a flat group, at any stage."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    if isinstance(inner, Mapping):
        inner = inner.get("state", {})
        return inner.get(group, {})
    return inner[group] if group < len(inner) else {}
