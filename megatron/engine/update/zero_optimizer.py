"""DeepSpeed's optimizer of ZeRO 1 and 2 with this trainer's reduction of gradients.

Partitions, main weights, loss scale and checkpoints in DeepSpeed's format are DeepSpeed's. The
gradients come from a :class:`~megatron.engine.update.reduction.GradientReduction`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.engine.update.optimizer import norm_of_groups, owned
from megatron.engine.update.reduction import Bucket, GradientReduction, ReductionRules
from megatron.kernels.sums import GradientSum
from megatron.parallel.collectives import all_gather_flat
from megatron.parallel.mesh import MODEL, Mesh
from megatron.parallel.shard import shard_of


class ParameterUse(NamedTuple):
    """The use of a parameter in a process.

    Attributes:
        position: in the order of the forward pass.
        passes: names of the backward passes with a gradient of it; empty for all.
        tied: torch's group of the pipeline stages with a copy of it; None without.
    """

    position: int
    passes: tuple[Hashable, ...] = ()
    tied: dist.ProcessGroup | None = None


def cut_into_buckets(
    params: Sequence[nn.Parameter], uses: Mapping[nn.Parameter, ParameterUse], most: int
) -> list[list[nn.Parameter]]:
    """Runs of parameters of at most ``most`` elements, or one parameter, with gradients in the same
    passes. Parameters with copies on other stages stay together, the same in the same order on
    each, whatever their passes are there."""
    runs: dict[Hashable, list[list[nn.Parameter]]] = {}
    order = sorted(params, key=lambda p: uses[p].position if uses[p].tied is not None else 0)
    for param in order:
        use = uses[param]
        parts = runs.setdefault(use.passes if use.tied is None else use.tied, [[]])
        size = sum(each.numel() for each in parts[-1])
        if use.tied is None and parts[-1] and size + param.numel() > most:
            parts.append([])
        parts[-1].append(param)
    return [part for parts in runs.values() for part in parts]


def bucket_of(
    params: Sequence[nn.Parameter],
    starts: Iterable[int],
    length: int,
    uses: Mapping[nn.Parameter, ParameterUse],
    mesh: Mesh,
) -> Bucket:
    """Return the bucket of parameters with the same replicas, from their places in ``length``
    elements. It waits for every pass that one of them is used in."""
    first, passes = params[0], {uses[param].passes for param in params}
    every = () if () in passes else chain.from_iterable(passes)
    places = dict(zip(params, starts, strict=False))
    return Bucket(places, length, mesh.replicas(shard_of(first)), uses[first].tied, every)


class ReducingOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer, with gradients from this trainer's reduction.

    Args:
        uses: of each parameter.
        stage: of ZeRO, 1 or 2; DeepSpeed's pipeline engine knows only 1.
        sums_in_fp32: sum over micro batches in float32.
        overlapped: reduce within the backward pass.
        args, options: of DeepSpeed's optimizer.
    """

    _own_step: Callable[[], None] | None = None
    gathers_late = False

    def __init__(
        self,
        *args: Any,
        uses: Mapping[nn.Parameter, ParameterUse],
        mesh: Mesh,
        stage: int,
        sums_in_fp32: bool,
        overlapped: bool,
        **options: Any,
    ) -> None:
        scatters = options["reduce_scatter"]
        # DeepSpeed's buffers, streams and hooks are not used, but it checks what goes together.
        options |= {"contiguous_gradients": True, "overlap_comm": False, "reduce_scatter": True}
        super().__init__(*args, **options)
        self._mesh, self._uses = mesh, uses
        self._arriving: dict[int, dist.Work] = {}
        self._kept: dict[int, Tensor] = {}
        self._counted = {p for p in uses if owned(p, mesh, MODEL)}
        buckets = [self._bucket(number) for number in range(len(self.bit16_groups))]
        # The last weights that are used get their gradients first.
        self._order = sorted(range(len(buckets)), key=lambda n: -self._first_use(n))
        self.order_of_use = self._order[::-1]  # by the next forward pass
        wire = self.communication_data_type
        rules = ReductionRules(
            each_pass=stage == 2,
            replicas=mesh.dense.size,
            overlapped=overlapped,
            scatters=scatters,
            sums=torch.float32 if sums_in_fp32 else None,
            wire=wire,
            first=wire == torch.float16 or not self.postscale_gradients,
        )
        self.reduction = GradientReduction([buckets[n] for n in self._order], rules)

    def _bucket(self, number: int) -> Bucket:
        params = self.round_robin_bit16_groups[number]
        # DeepSpeed 0.19.0 has no offsets: parameters are contiguous.
        offsets = getattr(self, "round_robin_bit16_offsets", None)
        starts = offsets[number] if offsets else accumulate((p.numel() for p in params), initial=0)
        length = self.bit16_groups_flat[number].numel()
        return bucket_of(params, starts, length, self._uses, self._mesh)

    def _first_use(self, number: int) -> int:
        return min(self._uses[param].position for param in self.bit16_groups[number])

    def create_gradient_handling_hooks(self) -> None:
        """Do nothing: the reduction has its own hooks."""

    def initialize_optimizer_states(self) -> None:
        """Nothing: DeepSpeed makes gradients of zeros, for Adagrad and for offloading."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Called after the last backward pass of a step."""
        for number, grads in zip(self._order, self.reduction.finish(), strict=True):
            self.averaged_gradients[number] = grads

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Called by DeepSpeed's engine after every backward pass at stage 2."""
        if self.is_gradient_accumulation_boundary():
            self.reduce_gradients()

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of the gradients of the whole model, a float32 scalar on the device."""
        counted = []
        for number, params in enumerate(self.params_in_partition):
            grads = self.averaged_gradients[number]
            grads = (grad for grad in grads if not getattr(grad, "_zero_padding", False))
            counted += [g for g, p in zip(grads, params, strict=False) if p in self._counted]
        groups, device = [self._mesh.dense, self._mesh.model], self.bit16_groups_flat[0].device
        # One number for all groups of parameters, which pipeline stages have not in common.
        return norm_of_groups([counted], torch.float32, torch.float32, groups, device)

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Called by DeepSpeed's step."""
        return self.norm()

    def update_by(self, step: Callable[[], None]) -> None:
        """Replace DeepSpeed's step."""
        self._own_step = step

    def step(self, closure: None = None) -> None:
        """Update the weights."""
        if self._own_step is None:
            super().step(closure)
        else:
            self._global_grad_norm = None  # DeepSpeed's value if it computes none
            self._own_step()

    def _optimizer_step(self, group_no: int) -> None:
        """Called by DeepSpeed's step for one group after another. Groups that are updated together
        are with the last of them; until then this keeps the gradients, which DeepSpeed drops."""
        groups, mains = self.optimizer.param_groups, self.single_partition_of_fp32_groups
        together = groups[group_no].get("together")
        same = [n for n, group in enumerate(groups) if group.get("together") == together]
        if together is None or len(same) == 1:
            super()._optimizer_step(group_no)
            return
        self._kept[group_no] = mains[group_no].grad
        if group_no < same[-1]:
            return
        for number in same:
            mains[number].grad = self._kept.pop(number)
        self.optimizer.param_groups = [groups[number] for number in same]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        for number, rank in zip(same, self._ranks(same), strict=True):
            mains[number].grad = None
            self.parallel_partitioned_bit16_groups[number][rank].data.copy_(mains[number].data)
        self._lazy_init_hp_params_optimizer_state()

    def _ranks(self, numbers: Iterable[int]) -> list[int]:
        firsts = (self.bit16_groups[number][0] for number in numbers)
        return [self._mesh.replicas(shard_of(param)).rank for param in firsts]

    def start_gather(self, number: int) -> None:
        """Begin to gather the updated parts of a group from all ranks."""
        flat = self.bit16_groups_flat[number]
        group = self._mesh.replicas(shard_of(self.bit16_groups[number][0]))
        if group.size > 1:
            part = self.parallel_partitioned_bit16_groups[number][group.rank]
            self._arriving[number] = all_gather_flat(flat, part, group=group.handle, async_op=True)

    def await_weights(self, numbers: Iterable[int] | None = None) -> None:
        """Wait for the updated weights that are on their way, of some groups or of all."""
        for number in self._arriving.keys() & (self._order if numbers is None else numbers):
            self._arriving.pop(number).wait()

    def forget_gradients(self) -> None:
        """Drop the gradients of a step before its update."""
        self.reduction.drop()
        for number in range(len(self.bit16_groups)):
            self.averaged_gradients[number] = self.all_grad_tensors[number] = None

    def destroy(self) -> None:
        """Called when the engine is closed."""
        self.reduction.close()
        super().destroy()


def sum_in_place(params: Iterable[nn.Parameter], wrapper: Any) -> None:
    """Make gradients of matrices be added to their sums where they are computed, see
    :mod:`megatron.kernels.sums`, if DeepSpeed's optimizer ``wrapper`` does nothing with them in
    every micro batch."""
    if hasattr(wrapper, "reduction"):
        wrapper.reduction.sum_in_place()
    elif not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        for param in params:
            if param.dim() == 2:
                GradientSum(param)
