"""Compressed layers of a model: select them by name, register learned pruning scores, and replace
weights and inputs in the forward pass.

Masks and quantisation groups are computed for the whole matrix (of each expert), so that every
parallel layout gives the same result.

Shapes: E experts of a rank, O outputs and I inputs of a whole matrix, N heads.
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
"""Last name component of the learned score parameters that rank elements for pruning (method
``topk``), by technique."""
MOMENTUM = 0.95
"""Momentum of the running average of a static activation range."""
_BLOCK = re.compile(r"(?:(?P<stack>encoder|decoder)\.)?layers\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERTS = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}


def is_scores(name: str) -> bool:
    """Return whether a canonical parameter name is that of learned pruning scores."""
    return name.rpartition(".")[2] in SCORES.values()


def names_of(module: str) -> Iterator[str]:
    """Yield the names of a module that patterns can match: its own and Megatron's."""
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
    """Return whether a pattern from the JSON matches any of a module's names."""
    return pattern == "*" or any(re.search(pattern, name) for name in names_of(module))


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding | WholeEmbedding)


def _compressible(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, including experts' layers, or an embedding."""
    linear = isinstance(module, ParallelLinear | WholeLinear) or hasattr(module, "add_low_rank")
    return linear or is_embedding(module)


@dataclass(frozen=True)
class Use:
    """Technique that applies to a module, and its group that contains the module."""

    technique: Technique
    group: ModuleGroup


@dataclass
class Clock:
    """Counter of the optimizer updates of a run with compression, without skipped ones."""

    updates: int = 0

    def reached(self, technique: Technique) -> bool:
        """Return whether a technique is enabled in the next forward pass."""
        return self.updates >= technique.offset


def uses_of(compression: Compression, name: str, embedding: bool) -> dict[str, Use]:
    """Return the techniques that apply to the module ``name``, by kind. Raises ConfigError if two
    groups of one technique match the module."""
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
    """Raise ConfigError if a pattern matches none of ``modules``, those of the whole model."""
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
    """Yield the compressible modules in the layer ``prefix``, with their canonical names."""
    for path, each in module.named_modules():
        if _compressible(each):
            yield ".".join(filter(None, (prefix, path))), each


def compressed_layers(
    compression: Compression, module: nn.Module, prefix: str
) -> Iterator[CompressedLayer]:
    """Yield the compression of each module in the layer ``prefix`` that a technique applies to.
    Raises ConfigError if a technique does not fit its module."""
    for name, each in compressed_modules(module, prefix):
        uses = uses_of(compression, name, is_embedding(each))
        if uses:
            yield CompressedLayer(name, each, uses)


def masked(kind: str, weight: Tensor, mask: Tensor) -> Tensor:
    """Multiply a weight by a technique's mask. The mask is [1, N] for heads, and otherwise
    broadcasts to the weight."""
    if kind != HEAD:
        return weight * mask.to(weight)
    mask_N1 = mask.to(weight).view(-1, 1)
    return (weight.unflatten(1, (len(mask_N1), -1)) * mask_N1).flatten(1)


class CompressedLayer:
    """Compression of one module, stored as the module's attribute ``compression``.

    Attributes:
        clock: None until the layer is attached to an engine in training.
        masks: masks for this rank's shard of the weight, by technique (method ``l1``).
        range: minimum and maximum of the inputs, float32 [2]. 0 before the first measurement, and
            None without a static range.
        measured: negated minimum, and maximum, of a step's inputs. None if not measured.
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
        """Name prefixes of the parameters that make up the weight."""
        return ("", "kv_") if getattr(self.module, "kv_weight", None) is not None else ("",)

    @property
    def learned(self) -> list[str]:
        """Techniques whose masks are computed from learned scores."""
        return self._pruned_by("topk")

    @property
    def fixed(self) -> list[str]:
        """Techniques whose masks are computed once, from the initial weights."""
        return self._pruned_by("l1")

    def _pruned_by(self, method: str) -> list[str]:
        kinds = (kind for kind in PRUNING if kind in self.uses)
        return [kind for kind in kinds if self.uses[kind].technique.shared["method"] == method]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters that make up the weight, even while the module's attributes are replaced."""
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
        """Register score parameters, initialised as in DeepSpeed: uniform in +-1 / sqrt(size of the
        last dimension)."""
        for prefix, weight in self.weights.items():
            shard = self.shard_of_mask(kind, shard_of(weight))
            name = SCORES[kind]
            if len(self.prefixes) > 1:
                shard = replace(shard, whole=name)
            init = Init(bound=shard.full_shape[-1] ** -0.5)
            tp: Any = self.module.tp
            self.module.register_parameter(prefix + name, parameter(shard, init, tp.coordinates))

    def shard_of_mask(self, kind: str, weight: Shard) -> Shard:
        """Return the shard of a mask or of scores, for the weight's shard. The whole shape is the
        weight's, or [..., O, 1] for rows, or [1, N] for heads."""
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
        """Number of updates after which inputs are quantised."""
        return self.uses[ACTIVATIONS].technique.offset

    def attach(self, clock: Clock, mesh: Mesh, device: torch.device) -> None:
        """Start compression, when the layer's engine is set up for training."""
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
        """Return the whole matrix (of each expert of this rank). ``shares`` are this rank's shards
        by parameter prefix. Collective: every rank of the tensor-parallel group must call it."""
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
        """Return this rank's shard of a whole matrix as returned by :meth:`whole`."""
        own = of_own_experts(shard, self.mesh.coordinates)
        return own.cut(whole, self._places[self.mesh.tensor.rank]) if own.cuts else whole

    def quantised(
        self, shares: Mapping[str, Tensor], bits: int, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Quantise the weight, given this rank's shards of it by prefix. Return the quantised
        shards. In an embedding each row is a quantisation group."""
        shared = self.uses[WEIGHTS].technique.shared
        symmetric, groups = shared["quantization_type"] == "symmetric", shared["quantize_groups"]
        shards = {prefix: shard_of(weight) for prefix, weight in self.weights.items()}
        values, drawn = shares[""], None
        if not self.embedding:
            values = self.whole(shares, shards)
        if noise is not None:
            cuts = shards[""].cuts
            if not self.embedding:  # noise for whole matrices of this rank's experts
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
        """Return the mask for a whole matrix of weights (method ``l1``) or of scores (``topk``)."""
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
        """Within this context, replace the module's weights and biases with the compressed ones."""
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
        """True if the module computes with changed weights, or if scores need a gradient."""
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
                # Scores that are not used yet get a zero gradient. Without any gradient, optimizers
                # would differ in whether they count the step.
                weight = ZeroGradient.apply(weight, getattr(module, prefix + SCORES[kind]))
        if weight is not first:
            module._parameters[f"{prefix}weight"] = weight  # type: ignore[assignment]
            if bias is not None:
                module._parameters[f"{prefix}bias"] = bias  # type: ignore[assignment]

    def _mask(self, kind: str, prefix: str, summed: bool = False) -> Tensor:
        """Return this rank's shard of a mask. With ``summed``, the gradient of scores that
        tensor-parallel ranks share is summed over these ranks."""
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
        """Return the inputs [..., I], quantised if the technique is enabled. In training, a static
        range is measured starting one step earlier."""
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
    """True once the range of the inputs has been measured."""

    def _cuts_inputs(self) -> bool:
        shard = shard_of(self.weights[""])
        return any(c.dim == len(shard.full_shape) - 1 and "tensor" in c.axes for c in shard.cuts)

    def _measure(self, x: Tensor) -> None:
        bounds = torch.stack([-x.min(), x.max()]).float()
        self.measured = bounds if self.measured is None else torch.maximum(self.measured, bounds)

    def follow(self, bounds: Tensor) -> None:
        """Update the moving average of the range with a step's (negated minimum, maximum). Values
        that are not finite are ignored."""
        assert self.range is not None
        if not bool(bounds.isfinite().all()):
            return
        batch = torch.stack([-bounds[0], bounds[1]]).to(self.range)
        if not self.ranged:
            self.range.copy_(batch)
        self.range.copy_(self.range * MOMENTUM + batch * (1 - MOMENTUM))
        self.ranged = True

    def wrap(self) -> None:
        """Replace the module's forward method with one that uses compressed weights and inputs."""
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
    """Return the compressed layers of this process's model, in order and without duplicates."""
    layers = (getattr(module, "compression", None) for module in model.modules())
    return [layer for layer in layers if isinstance(layer, CompressedLayer)]
