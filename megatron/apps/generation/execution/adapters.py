"""Several LoRA adapters on one model: each request uses the adapter that it selects.

Each adapter is computed for all rows of a pass but applied only to the rows that use it, so that a
row's result does not depend on the other rows.

Shapes: T rows of a pass, I inputs, O outputs, R total rank of an adapter's low-rank matrices in one
layer. The suffix P marks a dimension that is sharded by tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.apps.generation.request import SequencePart
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint
from megatron.config import ConfigError
from megatron.engine.train_engine import ModelEngine
from megatron.features.adapters.checkpoint import AdaptedSource, rows_of_part
from megatron.parallel.layers import ParallelLinear, RowMap
from megatron.parallel.linear import LinearMap, column_linear, linear
from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Shard, shard_of


@dataclass(frozen=True)
class ServedAddition:
    """A tensor-parallel rank's shard of an adapter's low-rank matrices for one layer.

    Attributes:
        down_RI: down-projection, shared by the layer's projections.
        ups: up-projections [OP, R], one for each of the layer's projections, with the LoRA scale.
        factors: with DoRA, factors [OP] on each projection's output before the bias. Rows that the
            adapter does not change have 1.
    """

    down_RI: Tensor
    ups: tuple[Tensor, ...]
    factors: tuple[Tensor, ...] | None

    @property
    def matrices(self) -> list[Tensor]:
        return [self.down_RI, *self.ups]


class ServedAdapters:
    """Adapters of a runner by name, and the rows that use each of them in the current pass."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names, self._device = tuple(names), device
        self.matrices: list[Tensor] = []
        # row mask, bool [T, 1], of each adapter used in this pass
        self.rows: dict[str, Tensor] = {}

    def begin(self, parts: Sequence[SequencePart], rows: int) -> None:
        """Record which rows of a pass use which adapter. Padding rows at the end use none."""
        owners = [part.adapter for part in parts for _ in part.tokens]
        self.rows = {
            name: torch.tensor(
                [owner == name for owner in owners] + [False] * (rows - len(owners)),
                device=self._device,
            )[:, None]
            for name in self.names
            if name in owners
        }


class _LayerAdditions:
    """Implementation of :class:`~megatron.parallel.layers.LayerAdapters` for a layer that several
    adapters change."""

    def __init__(self, served: ServedAdapters, additions: Mapping[str, ServedAddition]) -> None:
        self._served, self._additions = served, additions

    def outputs(
        self, layer: ParallelLinear, x_BSI: Tensor, maps: Sequence[LinearMap]
    ) -> tuple[Tensor, ...]:
        cut = shard_of(maps[0].weight).over("tensor")  # type: ignore[arg-type]
        if cut is None or cut.dim == 0:
            outputs = list(column_linear(x_BSI, maps, layer.tp))
            for rows_T1, addition in self._present():
                z_BSR = F.linear(x_BSI, addition.down_RI)
                for place, (each, up_OR) in enumerate(zip(maps, addition.ups, strict=True)):
                    added = outputs[place] + F.linear(z_BSR, up_OR)
                    if addition.factors is not None:
                        added = _scaled(added, addition.factors[place], each.bias)
                    outputs[place] = torch.where(rows_T1, added, outputs[place])
            return tuple(outputs)
        (each,) = maps
        # Row-parallel: add before the all-reduce, so that it sums each rank's contribution, and add
        # the bias after it, so that it is counted once.
        y_BSO = linear(x_BSI, each.weight, None, each.kernel, each.kept)
        for rows_T1, addition in self._present():
            added = y_BSO + F.linear(F.linear(x_BSI, addition.down_RI), addition.ups[0])
            y_BSO = torch.where(rows_T1, added, y_BSO)
        y_BSO = layer.tp.leave(y_BSO)
        for rows_T1, addition in self._present():
            if addition.factors is not None:
                y_BSO = torch.where(rows_T1, y_BSO * addition.factors[0], y_BSO)
        return (y_BSO if each.bias is None else y_BSO + layer.tp.shared(each.bias)[0],)

    def changed(self, layer: ParallelLinear, weight: Tensor) -> Sequence[RowMap]:
        maps: list[RowMap] = [(None, weight)]
        for rows_T1, addition in self._present():
            changed_OI = torch.addmm(weight, addition.ups[0], addition.down_RI)
            if addition.factors is not None:
                changed_OI = changed_OI * addition.factors[0][:, None]
            maps.append((rows_T1, changed_OI))
        return maps

    def _present(self) -> list[tuple[Tensor, ServedAddition]]:
        rows = self._served.rows
        return [(rows[name], one) for name, one in self._additions.items() if name in rows]


def _scaled(y_BSO: Tensor, factor_O: Tensor, bias_O: Tensor | None) -> Tensor:
    return y_BSO * factor_O if bias_O is None else (y_BSO - bias_O) * factor_O + bias_O


def named_folders(flags: Sequence[str]) -> dict[str, str]:
    """Return the adapter folders by name. The name comes from ``--adapter NAME=FOLDER``, or is the
    folder's own name. Raises ConfigError if two adapters have the same name."""
    folders: dict[str, str] = {}
    for flag in flags:
        name, equals, folder = flag.partition("=")
        if not equals:
            name, folder = Path(flag).resolve().name, flag
        if not name or not folder:
            raise ConfigError(f"--adapter {flag}: expected NAME=FOLDER")
        if name in folders:
            known = folders[name]
            raise ConfigError(f"--adapter {flag}: {name} is {known} already; give it a name")
        folders[name] = folder
    return folders


def served_adapters(
    engine: ModelEngine, folders: Mapping[str, str], base: Path
) -> ServedAdapters | None:
    """Load adapters onto the layers of an engine whose weights are those of the checkpoint
    ``base``. Collective: every rank must call it. Returns None if there are no folders. Raises
    ConfigError or CheckpointError if a folder does not contain an adapter for this model, or
    contains one that can only be merged into the weights."""
    if not folders:
        return None
    served = ServedAdapters(list(folders), engine.device)
    layers = {
        engine.names[weight].removesuffix(".weight"): module
        for module in engine.model.modules()
        if isinstance(module, ParallelLinear) and isinstance(weight := module.weight, nn.Parameter)
    }
    additions: dict[str, dict[str, ServedAddition]] = {}
    for name, folder in folders.items():
        source = _opened(name, folder, base)
        for adapted in source.adapted:
            place = adapted.removesuffix(".weight")
            if place in layers:
                addition = _addition(source, adapted, layers[place], engine.mesh.coordinates)
                additions.setdefault(place, {})[name] = addition
    for place, of_layer in additions.items():
        layers[place].adapters = _LayerAdditions(served, of_layer)
        served.matrices += [each for one in of_layer.values() for each in one.matrices]
    return served


def _opened(name: str, folder: str, base: Path) -> AdaptedSource:
    flag = f"--adapter {name}={folder}"
    location = locate_checkpoint(folder) if Path(folder).exists() else None
    if location is None or not location.form.on_base:
        raise ConfigError(
            f"{flag}: neither a folder of peft (adapter_config.json) nor a checkpoint of a run "
            "with --lora"
        )
    source = location._replace(base=str(base)).open()
    assert isinstance(source, AdaptedSource)
    if source.whole:
        raise ConfigError(
            f"{flag}: it has whole parameters ({', '.join(source.whole[:3])}), which requests "
            "cannot have of their own: tools/convert_checkpoint.py to-hf merges it into a model"
        )
    stacked = [weight for weight in source.adapted if len(source.base.shape(weight)) > 2]
    if stacked:
        raise ConfigError(
            f"{flag}: it has additions to experts ({stacked[0]}), which requests cannot have of "
            "their own: tools/convert_checkpoint.py to-hf merges it into a model"
        )
    if source.model.family != "gpt":
        raise ConfigError(
            f"{flag}: the prompts of an encoder are shared by all requests: merge it into a model "
            "with tools/convert_checkpoint.py to-hf"
        )
    return source


def _addition(
    source: AdaptedSource, weight: str, layer: ParallelLinear, coordinates: Coordinates
) -> ServedAddition:
    parts = source.adapted[weight]
    whole = source.base.tensor(weight)
    rows = {part: rows_of_part(source.model, part, whole.shape[0]) for part in parts}
    downs = {part: source.additions.tensor(names["a"]) for part, names in parts.items()}
    ranks = sum(len(down) for down in downs.values())
    up_OR, factor_O, first = torch.zeros(whole.shape[0], ranks), torch.ones(whole.shape[0]), 0
    for part, names in parts.items():
        place, down_rI = rows[part], downs[part]
        up_Or = source.additions.tensor(names["b"]) * source.scale_of(weight, part)
        if down_rI.shape[1] != whole.shape[1] or len(up_Or) != place.stop - place.start:
            raise CheckpointError(f"{source.folder}: the adapter of {weight} does not fit it")
        up_OR[place, first : first + len(down_rI)] = up_Or
        if "magnitude" in names:
            changed = torch.addmm(whole[place], up_Or, down_rI)
            length = torch.linalg.vector_norm(changed, dim=1)
            factor_O[place] = source.additions.tensor(names["magnitude"]) / length
        first += len(down_rI)
    down_RI = torch.cat(list(downs.values()))
    dora = any("magnitude" in names for names in parts.values())
    ups, factors = [], []
    weights = [layer.weight, getattr(layer, "kv_weight", None)]
    for each in (each for each in weights if isinstance(each, nn.Parameter)):
        like = each
        cut = shard_of(each).over("tensor")
        if cut is None:
            ups.append(up_OR)
            factors.append(factor_O)
        elif cut.dim == 0:
            ups.append(Shard(tuple(up_OR.shape), (cut,)).cut(up_OR, coordinates))
            factors.append(Shard(tuple(factor_O.shape), (cut,)).cut(factor_O, coordinates))
        else:
            down_RI = Shard(tuple(down_RI.shape), (replace(cut, parts=()),)).cut(
                down_RI, coordinates
            )
            ups.append(up_OR)
            factors.append(factor_O)
    return ServedAddition(
        down_RI.to(like),
        tuple(up.to(like).contiguous() for up in ups),
        tuple(factor.to(like) for factor in factors) if dora else None,
    )
