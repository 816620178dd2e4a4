"""Compressed layers of a model: their selection, the scores that pruning learns, and the
replacements of a layer's weights and inputs. A mask, or the groups of a quantised weight, cover the
whole matrix (of each expert), so that every layout computes the same.

Shapes: E experts of a rank, O outputs, I inputs, of a whole matrix; N heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import ConfigError
from megatron.features.compression.quantisers import StraightThrough, largest, quantise, within
from megatron.features.compression.settings import (
    ACTIVATIONS,
    HEAD,
    PRUNING,
    ROW,
    SPARSE,
    WEIGHTS,
    Compression,
    ModuleGroup,
    Technique,
)
from megatron.features.optimizers.matrices import of_own_experts
from megatron.formats.legacy_megatron.names import DECODER_BLOCK, HEADS, OUTER
from megatron.parallel.layers import (
    ParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WholeEmbedding,
    WholeLinear,
    ZeroGradient,
)
from megatron.parallel.mesh import Coordinates, Mesh
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of
from megatron.parallel.tensor_parallel import sum_at_once, sum_gradients

SCORES = {SPARSE: "sparse_mask_scores", ROW: "row_mask_scores", HEAD: "head_pruning_scores"}
"""Last names of the parameters whose order decides what is pruned (method ``topk``)."""
MOMENTUM = 0.95
"""Momentum of a static range of activations."""
_BLOCK = re.compile(r"(?:(?P<stack>encoder|decoder)\.)?layers\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERTS = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}


def is_scores(name: str) -> bool:
    """True for the canonical name of learned scores."""
    return name.rpartition(".")[2] in SCORES.values()


def names_of(module: str) -> Iterator[str]:
    """The names by which patterns can choose a module: its own, and Megatron's."""
    yield module
    match = _BLOCK.fullmatch(module)
    if match is None:
        tables = ((f"language_model.{there}", here) for there, here in OUTER.items())
        yield from (there for there, here in (*tables, *HEADS.items()) if here == module)
        return
    stack, rest = match["stack"] or "encoder", match["rest"]
    start = f"language_model.{stack}.layers.{match['number']}."
    if rest.startswith("mlp.experts."):
        name = _EXPERTS.get(rest.rpartition(".")[2])
        if name is not None:
            yield f"{start}mlp.deepspeed_moe.experts.deepspeed_experts.{name}"
    yield from (start + there for there, here in DECODER_BLOCK.items() if here == rest)
    yield start + rest


def matches(pattern: str, module: str) -> bool:
    """True if a pattern of the JSON is in one of the names of a module."""
    return pattern == "*" or any(re.search(pattern, name) for name in names_of(module))


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding | WholeEmbedding)


def _compressible(module: nn.Module) -> bool:
    """True for linear layers, also of experts, and embeddings."""
    linear = isinstance(module, ParallelLinear | WholeLinear) or hasattr(module, "add_low_rank")
    return linear or is_embedding(module)


@dataclass(frozen=True)
class Use:
    """A technique with the group of modules that a layer is in."""

    technique: Technique
    group: ModuleGroup


@dataclass
class Clock:
    """Number of updates of a run with compression, excluding skipped ones."""

    updates: int = 0

    def reached(self, technique: Technique) -> bool:
        """True if a technique is enabled in the next forward pass."""
        return self.updates >= technique.offset


def uses_of(compression: Compression, name: str, embedding: bool) -> dict[str, Use]:
    """Return the module's techniques. Raises ConfigError if two groups of one match it."""
    uses: dict[str, Use] = {}
    for kind, technique in compression.techniques.items():
        if embedding and kind != WEIGHTS:
            continue
        chosen = [g for g in technique.groups if any(matches(p, name) for p in g.modules)]
        if len(chosen) > 1:
            raise ConfigError(
                f"{chosen[0].place}.modules and {chosen[1].place}.modules both have {name}; a "
                "module can be in one group of a technique"
            )
        if chosen:
            uses[kind] = Use(technique, chosen[0])
    return uses


def require_matches(compression: Compression, modules: Sequence[str]) -> None:
    """Raises ConfigError for a pattern in which no module of the whole model is."""
    for technique in compression.techniques.values():
        for group in technique.groups:
            for pattern in (*group.modules, *(p for row in group.related for p in row)):
                if not any(matches(pattern, name) for name in modules):
                    names = dict.fromkeys(name for each in modules for name in names_of(each))
                    some = ", ".join([*names][:6])
                    raise ConfigError(
                        f"{group.place}: no module of this model has {pattern!r} in its name; "
                        f"names are {some}, ..."
                    )


def compressed_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The canonical names of the modules in the layer ``prefix`` that can be compressed."""
    for path, each in module.named_modules():
        if _compressible(each):
            yield ".".join(filter(None, (prefix, path))), each


def compressed_layers(
    compression: Compression, module: nn.Module, prefix: str
) -> Iterator[CompressedLayer]:
    """The compression of the modules in the layer ``prefix`` that are in a group. Raises
    ConfigError for a module that does not fit."""
    for name, each in compressed_modules(module, prefix):
        uses = uses_of(compression, name, is_embedding(each))
        if uses:
            yield CompressedLayer(name, each, uses)


def masked(kind: str, weight: Tensor, mask: Tensor) -> Tensor:
    """A weight, zero where the mask of a technique is: of heads [1, N], or else broadcast."""
    if kind != HEAD:
        return weight * mask.to(weight)
    mask_N1 = mask.to(weight).view(-1, 1)
    return (weight.unflatten(1, (len(mask_N1), -1)) * mask_N1).flatten(1)


class CompressedLayer:
    """Compression of one module, stored as its attribute ``compression``.

    Attributes:
        clock: None before an engine in training has the layer.
        masks: of the rank's share of the weight, by technique (``l1``).
        range: of the inputs, float32 [2]; equal numbers before the first measurement.
        measured: negative of the smallest, and the largest input of a step; None for none.
    """

    clock: Clock | None = None
    mesh: Mesh

    def __init__(self, name: str, module: nn.Module, uses: Mapping[str, Use]) -> None:
        self.name, self.module, self.uses = name, module, uses
        self._weights: dict[str, nn.Parameter] = {}
        self.embedding = is_embedding(module)
        self.masks: dict[str, Tensor] = {}
        self.range: Tensor | None = None
        self.measured: Tensor | None = None
        self._check_sizes()
        for kind in self.learned:
            self._add_scores(kind)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of the parameters that are parts of the weight."""
        return ("", "kv_") if getattr(self.module, "kv_weight", None) is not None else ("",)

    @property
    def learned(self) -> list[str]:
        """Techniques whose masks follow from scores that are learned."""
        return self._pruned_by("topk")

    @property
    def fixed(self) -> list[str]:
        """Techniques whose masks follow from the weights at the start."""
        return self._pruned_by("l1")

    def _pruned_by(self, method: str) -> list[str]:
        kinds = (kind for kind in PRUNING if kind in self.uses)
        return [kind for kind in kinds if self.uses[kind].technique.shared["method"] == method]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that are parts of the weight, while the module may have other values."""
        return self._weights or {
            prefix: getattr(self.module, f"{prefix}weight") for prefix in self.prefixes
        }

    def _check_sizes(self) -> None:
        shard = shard_of(self.weights[""])
        *_, outputs, inputs = shard.full_shape
        use = self.uses.get(WEIGHTS)
        if use is not None and not self.embedding:
            groups = use.technique.shared["quantize_groups"]
            if outputs * inputs % groups:
                raise ConfigError(
                    f"{use.group.place}: quantize_groups {groups} does not divide the "
                    f"{outputs} x {inputs} elements of {self.name}"
                )
        if ROW in self.uses and len(self.prefixes) > 1:
            raise ConfigError(
                f"{self.uses[ROW].group.place}: {self.name} has fewer heads of keys and values "
                "than tensor-parallel ranks, and its rows cannot be pruned; use a smaller "
                "--tensor-model-parallel-size"
            )
        if HEAD in self.uses:
            heads = self.uses[HEAD].technique.shared["num_heads"]
            if not isinstance(self.module, RowParallelLinear) or inputs % heads:
                raise ConfigError(
                    f"{self.uses[HEAD].group.place}: {self.name} is not the output projection of "
                    f"an attention with num_heads {heads}; name that (self_attention.dense)"
                )

    def _add_scores(self, kind: str) -> None:
        """Scores as DeepSpeed draws them, uniform between -1 and 1 over the root of the last
        dimension."""
        for prefix, weight in self.weights.items():
            shard = self.shard_of_mask(kind, shard_of(weight))
            name = SCORES[kind]
            if len(self.prefixes) > 1:
                shard = replace(shard, whole=name)
            init = Init(bound=shard.full_shape[-1] ** -0.5)
            tp: Any = self.module.tp
            self.module.register_parameter(prefix + name, parameter(shard, init, tp.coordinates))

    def shard_of_mask(self, kind: str, weight: Shard) -> Shard:
        """The shard of a mask: like the weight, [..., O, 1] of rows, or [1, N] of heads."""
        if kind == SPARSE:
            return Shard(weight.full_shape, weight.cuts)
        if kind == HEAD:
            heads = self.uses[HEAD].technique.shared["num_heads"]
            return Shard((1, heads), (Cut(1),))
        last = len(weight.full_shape) - 1
        cuts = tuple(cut for cut in weight.cuts if cut.dim != last)
        return Shard((*weight.full_shape[:-1], 1), cuts)

    @property
    def offset_of_inputs(self) -> int:
        """Number of updates from which on inputs are quantised."""
        return self.uses[ACTIVATIONS].technique.offset

    def attach(self, clock: Clock, mesh: Mesh, device: torch.device) -> None:
        """Begins to take part in the training of an engine."""
        self.clock, self.mesh = clock, mesh
        sum_at_once(self.module.parameters(recurse=False))
        use = self.uses.get(ACTIVATIONS)
        if use is not None and use.technique.shared["range_calibration"] == "static":
            self.range = torch.zeros(2, device=device)

    # Whole matrices.

    @property
    def _places(self) -> list[Coordinates]:
        return [{"tensor": (n, self.mesh.tensor.size)} for n in range(self.mesh.tensor.size)]

    def whole(self, shares: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Tensor:
        """The whole matrix (of each expert of this rank), from the share that each tensor-parallel
        rank has of the parameters with these prefixes; every rank of them must ask for it."""
        own = {p: of_own_experts(shard, self.mesh.coordinates) for p, shard in shards.items()}
        if not any(shard.cuts for shard in own.values()) or self.mesh.tensor.size == 1:
            return shares[""]
        result = shares[""].new_empty(own[""].full_shape)
        for prefix, shard in own.items():
            share = shares[prefix].contiguous()
            parts = [torch.empty_like(share) for _ in self._places]
            dist.all_gather(parts, share, group=self.mesh.tensor.handle)
            for part, place in zip(parts, self._places, strict=True):
                shard.place(result, part, place)
        return result

    def cut(self, whole: Tensor, shard: Shard) -> Tensor:
        """Return this rank's share of the result of :meth:`whole`."""
        own = of_own_experts(shard, self.mesh.coordinates)
        return own.cut(whole, self._places[self.mesh.tensor.rank]) if own.cuts else whole

    def quantised(
        self, shares: Mapping[str, Tensor], bits: int, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The shares of the quantised weight; an embedding has a group for each row."""
        shared = self.uses[WEIGHTS].technique.shared
        symmetric, groups = shared["quantization_type"] == "symmetric", shared["quantize_groups"]
        shards = {prefix: shard_of(weight) for prefix, weight in self.weights.items()}
        values, drawn = shares[""], None
        if not self.embedding:
            values = self.whole(shares, shards)
        if noise is not None:
            cuts = shards[""].cuts
            if not self.embedding:  # the whole matrices of own experts
                cuts = tuple(cut for cut in cuts if "expert" in cut.axes)
            own = Shard(shards[""].full_shape, cuts)
            drawn = own.cut(noise, self.mesh.coordinates).to(values)
        if self.embedding or values.dim() > 2:
            groups = len(values) * (1 if self.embedding else groups)
        result = quantise(values, bits, groups, symmetric, drawn)
        if self.embedding:
            return {"": result}
        return {prefix: self.cut(result, shard) for prefix, shard in shards.items()}

    def mask_of(self, kind: str, whole: Tensor) -> Tensor:
        """The mask of a whole matrix of weights (``l1``) or of scores (``topk``)."""
        use = self.uses[kind]
        ratio, learned = use.group.params["dense_ratio"], use.technique.shared["method"] == "topk"
        if whole.dim() > 2:
            return torch.stack([self._mask_of(kind, each, ratio, learned) for each in whole])
        return self._mask_of(kind, whole, ratio, learned)

    def _mask_of(self, kind: str, whole: Tensor, ratio: float, learned: bool) -> Tensor:
        if learned:
            return largest(whole, ratio)
        if kind == SPARSE:
            return largest(whole.abs(), ratio)
        return largest(torch.linalg.norm(whole, ord=1, dim=1), ratio).view(-1, 1)

    # The forward pass.

    @contextmanager
    def effective(self) -> Iterator[None]:
        """Within it the module has the weights and biases that it computes with."""
        kept = dict(self.module._parameters)
        try:
            for prefix in self.prefixes:
                self._replace(prefix)
            yield
        finally:
            self.module._parameters.update(kept)

    def _active(self, kind: str) -> bool:
        return kind in self.uses and self.clock.reached(self.uses[kind].technique)  # type: ignore[union-attr]

    @property
    def changes_weights(self) -> bool:
        """True if the module computes with other weights, or scores need a gradient."""
        return bool(self.learned) or any(map(self._active, PRUNING)) or self._quantises

    @property
    def _quantises(self) -> bool:
        return self._active(WEIGHTS) and not self.uses[WEIGHTS].technique.after_updates

    def _replace(self, prefix: str) -> None:
        module = self.module
        weight: Tensor = getattr(module, f"{prefix}weight")
        bias: Tensor | None = getattr(module, f"{prefix}bias", None)
        first, shard = weight, shard_of(weight)  # type: ignore[arg-type]
        if self._quantises:
            shares = {p: each.detach() for p, each in self.weights.items()}
            bits = self.uses[WEIGHTS].group.params["target_bits"]
            weight = StraightThrough.apply(weight, self.quantised(shares, bits)[prefix])
        for kind in filter(self._active, PRUNING):
            summed = kind == ROW and any(c.dim == len(shard.full_shape) - 1 for c in shard.cuts)
            weight = masked(kind, weight, self._mask(kind, prefix, summed))
            if kind == ROW and bias is not None:
                bias = bias * self._mask(ROW, prefix).to(bias).view_as(bias)
        for kind in self.learned:
            if not self._active(kind):
                # Without a gradient some optimizers would not count the step, and others would.
                weight = ZeroGradient.apply(weight, getattr(module, prefix + SCORES[kind]))
        if weight is not first:
            module._parameters[f"{prefix}weight"] = weight  # type: ignore[assignment]
            if bias is not None:
                module._parameters[f"{prefix}bias"] = bias  # type: ignore[assignment]

    def _mask(self, kind: str, prefix: str, summed: bool = False) -> Tensor:
        """Return this rank's share of a mask; with ``summed`` the gradient of shared scores is
        summed over ranks."""
        if kind in self.masks:
            return self.masks[prefix + kind]
        scores = getattr(self.module, prefix + SCORES[kind])
        every = {p: getattr(self.module, p + SCORES[kind]) for p in self.prefixes}
        shards = {p: shard_of(each) for p, each in every.items()}
        whole = self.whole({p: each.detach() for p, each in every.items()}, shards)
        mask = self.cut(self.mask_of(kind, whole), shards[prefix])
        if summed:
            (scores,) = sum_gradients(self.mesh.tensor, scores)
        return StraightThrough.apply(scores, mask)

    def input(self, x: Tensor) -> Tensor:
        """The inputs, [..., I], that the layer computes with; in training their range is measured
        from the step before the one in which they are quantised."""
        use = self.uses.get(ACTIVATIONS)
        if use is None or not x.is_floating_point() or not x.numel():
            return x
        assert self.clock is not None
        technique = use.technique
        bits, symmetric = use.group.params["bits"], technique.shared["quantization_type"]
        if self.range is None:
            if not self.clock.reached(technique):
                return x
            bounds = torch.stack([-x.detach().amin(-1), x.detach().amax(-1)])
            if self.mesh.tensor.size > 1 and self._cuts_inputs():
                dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.mesh.tensor.handle)
            lowest, highest = -bounds[0].unsqueeze(-1), bounds[1].unsqueeze(-1)
        else:
            if self.module.training and self.clock.updates + 1 >= technique.offset:
                self._measure(x.detach())
            if not self.clock.reached(technique) or not self.ranged:
                return x
            lowest, highest = self.range
        y = within(x.detach(), lowest, highest, bits, symmetric == "symmetric")
        return StraightThrough.apply(x, y.to(x.dtype))

    ranged = False
    """True if there is a range of inputs."""

    def _cuts_inputs(self) -> bool:
        shard = shard_of(self.weights[""])
        return any(c.dim == len(shard.full_shape) - 1 and "tensor" in c.axes for c in shard.cuts)

    def _measure(self, x: Tensor) -> None:
        bounds = torch.stack([-x.min(), x.max()]).float()
        self.measured = bounds if self.measured is None else torch.maximum(self.measured, bounds)

    def follow(self, bounds: Tensor) -> None:
        """Moves the range towards a step's: its negative smallest and its largest input."""
        assert self.range is not None
        if not bool(bounds.isfinite().all()):
            return
        batch = torch.stack([-bounds[0], bounds[1]]).to(self.range)
        if not self.ranged:
            self.range.copy_(batch)
        self.range.copy_(self.range * MOMENTUM + batch * (1 - MOMENTUM))
        self.ranged = True

    def wrap(self) -> None:
        """Makes the module compute with what this layer says."""
        self._weights = self.weights
        self.module.compression = self  # type: ignore[assignment]
        if hasattr(self.module, "changes_input"):
            self.module.changes_input = ACTIVATIONS in self.uses  # type: ignore[assignment]
        self.module.forward = partial(_forward, self, self.module.forward)  # type: ignore[method-assign]


def _forward(layer: CompressedLayer, inner: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    if layer.clock is None:
        return inner(x, *args, **options)
    x = layer.input(x)
    if not layer.changes_weights:
        return inner(x, *args, **options)
    with layer.effective():
        return inner(x, *args, **options)


def layers_in(model: nn.Module) -> list[CompressedLayer]:
    """The layers of a process that compress, in order, each once."""
    layers = (getattr(module, "compression", None) for module in model.modules())
    return [layer for layer in layers if isinstance(layer, CompressedLayer)]
