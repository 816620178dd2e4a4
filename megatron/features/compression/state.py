"""Compression state that persists between steps: the number of updates, activation ranges, masks,
and the quantised values of weights that are overwritten after each update (MoQ)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.state import Float32Partition, has_main_weights, places, set_working_weights
from megatron.engine.train_engine import TrainEngine
from megatron.features.compression.layers import Clock, CompressedLayer, layers_in
from megatron.features.compression.quantisers import bits_after, share_of_weights
from megatron.features.compression.settings import ENABLED, WEIGHTS, Compression, Technique
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import derive_seed, generator
from megatron.parallel.shard import shard_of
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.processes import is_main_process

FILE = "compression"
"""Prefix of the state's files in checkpoints."""
UPDATES = "updates"
_RANGE = "input_range"


def quantisations(technique: Technique, updates: int) -> int:
    """Return how often weights have been overwritten after ``updates`` updates, counted as in
    DeepSpeed. With offset 0 they are also overwritten before the first forward pass. Otherwise they
    are first overwritten in the update after the offset."""
    return updates - technique.offset if technique.offset else updates + 1


class CompressionState(KernelStates):
    """Compression state of a run. With MoQ, the model's weights are recomputed from the exact
    master weights before the first forward pass after each update or load."""

    file = FILE

    def __init__(self, compression: Compression, mesh: Mesh, seed: int) -> None:
        self.clock = Clock()
        self._compression, self._mesh, self._seed = compression, mesh, seed
        self._layers: list[CompressedLayer] = []
        self._stale = True
        self._attached: TrainEngine | None = None
        self._packed: dict[str, Tensor] = {}
        self._main: dict[nn.Parameter, Tensor] = {}
        """Exact weights of parameters that the optimizer updates in place, if there are no master
        weights. The model then computes with the quantised ones."""

    def attach(self, engine: TrainEngine) -> None:
        """Start compressing an engine's model."""
        self._attached, self._layers = engine, layers_in(engine.model)
        self._place_of = places(engine)
        for layer in self._layers:
            layer.attach(self.clock, self._mesh, engine.device)
        self._of_param = {
            param: layer
            for layer in self._layers
            if WEIGHTS in layer.uses and layer.uses[WEIGHTS].technique.after_updates
            for param in layer.weights.values()
            if param.requires_grad
        }
        if self._of_param and not has_main_weights(engine):
            engine.view = lambda main, state: Float32Partition(self._main.get(main, main), state)  # type: ignore[call-overload]

    @property
    def _engine(self) -> TrainEngine:
        assert self._attached is not None
        return self._attached

    def advance(self) -> list[str]:
        """Count an update, and return the kinds of the techniques that it enables."""
        self.clock.updates += 1
        techniques = self._compression.techniques.values()
        return [each.kind for each in techniques if each.offset == self.clock.updates]

    @property
    def enabled(self) -> list[tuple[str, int]]:
        """(kind, offset) of each enabled technique. The offset is a number of updates."""
        techniques = self._compression.techniques.values()
        return [(each.kind, each.offset) for each in techniques if self.clock.reached(each)]

    # Between steps.

    @torch.no_grad()
    def refresh(self) -> None:
        if not self._stale or self._attached is None:
            return
        self._stale = False
        self._attached.backend.await_weights()
        for layer in self._layers:
            self._add_masks(layer)
        self._overwrite()

    def invalidate(self) -> None:
        self._stale = True

    def forget_step(self) -> None:
        for layer in self._layers:
            layer.measured = None

    @torch.no_grad()
    def end_step(self) -> None:
        self._stale = True
        for param, values in self._main.items():
            param.data.copy_(values)
        self._main.clear()
        ranged = [layer for layer in self._layers if layer.range is not None]
        if not ranged or self.clock.updates + 1 < ranged[0].offset_of_inputs:
            return
        # -inf, for layers that this rank has not measured, such as an expert without tokens
        nothing = torch.full((2,), -float("inf"), device=self._engine.device)
        bounds = torch.stack([nothing if e.measured is None else e.measured for e in ranged])
        for group in (self._mesh.dense, self._mesh.tensor):
            if group.size > 1:
                dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group.handle)
        for layer, each in zip(ranged, bounds, strict=True):
            layer.measured = None
            layer.follow(each)

    # Weights that are overwritten after updates.

    def _overwrite(self) -> None:
        technique = self._compression.moq
        if technique is None or quantisations(technique, self.clock.updates) < 1:
            return
        engine, values = self._engine, dict[nn.Parameter, Tensor]()
        others = frozenset(engine.names.keys() - self._of_param.keys())
        if not has_main_weights(engine):
            for param in self._of_param:
                self._main.setdefault(param, param.detach().clone())

        def of_param(param: nn.Parameter, start: int, end: int) -> Tensor:
            if param not in values:
                values.update(self._quantised(self._of_param[param], technique))
            return values.pop(param).reshape(-1)[start:end]

        with self._whole_small_ones():
            set_working_weights(engine, of_param, but=others)

    @contextlib.contextmanager
    def _whole_small_ones(self) -> Iterator[None]:
        """Partition ZeRO 3's small parameters in this block. Between steps every rank has them
        whole."""
        wrapper = self._engine.optimizer_wrapper
        whole = wrapper.persistent_parameters if self._engine.stage == 3 else []
        if whole:
            whole[0].partition(whole)
        yield
        if whole:
            whole[0].all_gather(whole)

    def _quantised(
        self, layer: CompressedLayer, technique: Technique
    ) -> dict[nn.Parameter, Tensor]:
        """Return a layer's quantised parameters, computed from its rounded master weights."""
        params, steps = layer.weights, quantisations(technique, self.clock.updates)
        shares = {prefix: self._share(param).to(param.dtype) for prefix, param in params.items()}
        results = overwritten(layer, shares, self._seed, steps)
        return {params[prefix]: each for prefix, each in results.items()}

    def _share(self, param: nn.Parameter) -> Tensor:
        """Return the master weights of this tensor-parallel rank's shard of a parameter."""
        shape = shard_of(param).local_shape(self._mesh.coordinates)
        if param in self._main:
            return self._main[param]
        first, holder, offset, length = self._place_of(param)
        if self._engine.stage == 0:
            return holder.data.view(shape)
        flat = torch.zeros(int(np.prod(shape)), dtype=holder.dtype, device=self._engine.device)
        if length > 0:
            length = min(length, flat.numel() - first)
            flat[first : first + length] = holder.data.view(-1)[offset : offset + length]
        replicas = self._mesh.replicas(shard_of(param))
        if replicas.size > 1:
            dist.all_reduce(flat, group=replicas.handle)
        return flat.view(shape)

    # Masks that are computed once, at the start.

    def _add_masks(self, layer: CompressedLayer) -> None:
        """Compute a layer's missing masks from the magnitudes of its weights. Collective."""
        for kind in layer.fixed:
            if kind in layer.masks:
                continue
            params = layer.weights
            shares = {prefix: self._share(param) for prefix, param in params.items()}
            whole = layer.whole(shares, {p: shard_of(each) for p, each in params.items()})
            self._set_mask(layer, kind, self._of_all_experts(layer, layer.mask_of(kind, whole)))

    def _of_all_experts(self, layer: CompressedLayer, mask: Tensor) -> Tensor:
        shard = shard_of(layer.weights[""])
        axes = next((cut.axes for cut in shard.cuts if "expert" in cut.axes), ())
        group = self._mesh.group(*axes) if axes else None
        if group is None or group.size == 1:
            return mask
        parts = [torch.empty_like(mask) for _ in range(group.size)]
        dist.all_gather(parts, mask.contiguous(), group=group.handle)
        return torch.cat(parts)

    def _set_mask(self, layer: CompressedLayer, kind: str, whole: Tensor) -> None:
        """Store a mask for the whole matrix (of all experts): this rank's shard for training, and
        the whole mask as packed bits for checkpoints."""
        for prefix, param in layer.weights.items():
            shard = layer.shard_of_mask(kind, shard_of(param))
            local = shard.cut(whole, self._mesh.coordinates)
            layer.masks[prefix + kind] = local.to(param.device, torch.bool)
        bits = np.packbits(whole.cpu().numpy().astype(bool))
        self._packed[f"{layer.name}:{kind}"] = torch.from_numpy(bits)

    # Checkpoints.

    def state(self) -> dict[str, Tensor]:
        ranges = {
            f"{layer.name}:{_RANGE}": layer.range.clone()
            for layer in self._layers
            if layer.range is not None and layer.ranged
        }
        count = torch.tensor([self.clock.updates], dtype=torch.int64).view(torch.uint8)
        return {UPDATES: count, **ranges, **self._packed}

    def load(self, state: Mapping[str, Tensor], folder: Path) -> str | None:
        self._stale = True
        if UPDATES not in state:
            return (
                f"{folder} has no state of compression: its schedules begin with this run, at "
                "update 0"
            )
        self.clock.updates = updates_in(state)
        missing = []
        for layer in self._layers:
            stored = state.get(f"{layer.name}:{_RANGE}")
            if layer.range is not None and stored is not None:
                layer.range.copy_(stored)
                layer.ranged = True
            for kind in layer.fixed:
                packed = state.get(f"{layer.name}:{kind}")
                if packed is None:
                    missing.append(layer.name)
                    continue
                shape = layer.shard_of_mask(kind, shard_of(layer.weights[""])).canonical_shape
                self._set_mask(layer, kind, unpacked(packed, shape))
        if missing:
            return (
                f"{folder} has no masks of {', '.join(missing[:3])}: they are those of its weights"
            )
        return None


def schedule(technique: Technique, params: Mapping[str, Any], steps: int) -> tuple[int, float]:
    """Return the number of bits in quantisation number ``steps``, and the fraction of the
    unquantised weight that is mixed in."""
    bounds = params["start_bits"], params["target_bits"], params["quantization_period"]
    mixed = technique.shared["fp16_mixed_quantize"]
    change = mixed["quantize_change_ratio"]
    share = share_of_weights(steps, *bounds, change) if mixed["enabled"] else 0.0
    return bits_after(steps, *bounds), share


def overwritten(
    layer: CompressedLayer, shares: Mapping[str, Tensor], seed: int, steps: int
) -> dict[str, Tensor]:
    """Return the values that replace ``shares``, a weight's shards, in quantisation number
    ``steps``. The noise for stochastic rounding is drawn for the whole weight, so that it is the
    same in every layout."""
    use = layer.uses[WEIGHTS]
    (bits, share), noise = schedule(use.technique, use.group.params, steps), None
    if use.technique.shared["rounding"] == "stochastic":
        drawn = generator(derive_seed(seed, FILE, steps), f"{layer.name}.weight")
        noise = torch.rand(shard_of(layer.weights[""]).canonical_shape, generator=drawn) - 0.5
    results = layer.quantised(shares, bits, noise)
    if share:
        results = {p: share * shares[p] + (1 - share) * each for p, each in results.items()}
    return results


def updates_in(state: Mapping[str, Tensor]) -> int:
    """Return the number of updates in a checkpoint's compression state, or 0 if not recorded."""
    return int(state[UPDATES].clone().view(torch.int64)) if UPDATES in state else 0


def unpacked(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpack a mask with this shape from the bytes in a checkpoint."""
    mask = np.unpackbits(bits.numpy(), count=int(np.prod(shape)))
    return torch.from_numpy(mask.reshape(tuple(shape)))


def state_of(engine: TrainEngine) -> CompressionState | None:
    """Return an engine's compression state, or None if it has none."""
    members: Sequence[KernelStates] = engine.kernels.members
    return next((each for each in members if isinstance(each, CompressionState)), None)


class CompressionSteps(Callback):
    """Callback that counts the updates of a run, and reports when techniques are enabled."""

    def __init__(self, state: CompressionState) -> None:
        self._state = state

    def __enter__(self) -> CompressionSteps:
        for kind, since in self._state.enabled:
            _say(f"{ENABLED[kind]} is enabled at step {since}")
        return self

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if not bool(step.result.skipped):
            for kind in self._state.advance():
                _say(f"{ENABLED[kind]} is enabled at step {self._state.clock.updates}")


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)
