"""DeepSpeed's ZeRO 1 and 2 optimizer with this trainer's gradient reduction.

DeepSpeed still handles partitions, main weights, loss scale and checkpoints in its own format. A
:class:`~megatron.engine.update.reduction.GradientReduction` provides the gradients.
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
from megatron.parallel.mesh import MODEL, Group, Mesh
from megatron.parallel.shard import shard_of


class ParameterUse(NamedTuple):
    """Use of a parameter in this process's passes.

    Attributes:
        position: position in the order of the forward pass.
        passes: names of the backward passes that compute its gradient; empty for all.
        tied: torch's process group of the pipeline stages with a copy; None without copies.
    """

    position: int
    passes: tuple[Hashable, ...] = ()
    tied: dist.ProcessGroup | None = None


def cut_into_buckets(
    params: Sequence[nn.Parameter],
    uses: Mapping[nn.Parameter, ParameterUse],
    most: int,
    copies_apart: bool = False,
) -> list[list[nn.Parameter]]:
    """Cut parameters into runs of at most ``most`` elements, or a single parameter, whose gradients
    are computed in the same passes. Parameters with copies on other stages stay in one run,
    whatever their passes, so that the run has the same order on each stage. With ``copies_apart``
    tensor-parallel ranks with a copy of one parameter of a run have copies of all."""
    runs: dict[Hashable, list[list[nn.Parameter]]] = {}
    order = sorted(params, key=lambda p: uses[p].position if uses[p].tied is not None else 0)
    for param in order:
        use = uses[param]
        cut = shard_of(param).over("tensor") if copies_apart else None
        key = use.passes if use.tied is None else use.tied, cut and cut.copies
        parts = runs.setdefault(key, [[]])
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
    """Return a bucket for parameters with the same replicas. ``starts`` are their offsets in its
    ``length`` elements. The bucket waits for every pass that uses one of the parameters."""
    first, passes = params[0], {uses[param].passes for param in params}
    every = () if () in passes else chain.from_iterable(passes)
    places = dict(zip(params, starts, strict=False))
    return Bucket(places, length, mesh.replicas(shard_of(first)), uses[first].tied, every)


class ReducingOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO 1 and 2 optimizer, with gradients from this trainer's reduction.

    Args:
        uses: use of each parameter in passes.
        stage: ZeRO stage, 1 or 2. DeepSpeed's pipeline engine supports only 1.
        sums_in_fp32: whether gradients are summed over micro batches in float32.
        overlapped: whether gradients are reduced during the backward pass.
        args, options: arguments of DeepSpeed's optimizer.
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
        # DeepSpeed's buffers, streams and hooks are not used, but it checks these options.
        options |= {"contiguous_gradients": True, "overlap_comm": False, "reduce_scatter": True}
        super().__init__(*args, **options)
        self._mesh, self._uses = mesh, uses
        self._arriving: dict[int, dist.Work] = {}
        self._kept: dict[int, Tensor] = {}
        self._counted = {p for p in uses if owned(p, mesh, MODEL)}
        buckets = [self._bucket(number) for number in range(len(self.bit16_groups))]
        # Backward passes compute the gradients of the last used weights first.
        self._order = sorted(range(len(buckets)), key=lambda n: -self._first_use(n))
        self.order_of_use = self._order[::-1]  # for the next forward pass
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
        # DeepSpeed 0.19.0 stores no offsets, as its parameters are contiguous.
        offsets = getattr(self, "round_robin_bit16_offsets", None)
        starts = offsets[number] if offsets else accumulate((p.numel() for p in params), initial=0)
        length = self.bit16_groups_flat[number].numel()
        return bucket_of(params, starts, length, self._uses, self._mesh)

    def _first_use(self, number: int) -> int:
        return min(self._uses[param].position for param in self.bit16_groups[number])

    def create_gradient_handling_hooks(self) -> None:
        """Do nothing: the reduction has its own hooks."""

    def initialize_optimizer_states(self) -> None:
        """Do nothing: DeepSpeed would create zero gradients, for Adagrad and for offloading."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Finish the reduction. Called after a step's last backward pass."""
        for number, grads in zip(self._order, self.reduction.finish(), strict=True):
            self.averaged_gradients[number] = grads

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Finish the reduction at a step's end. At stage 2 DeepSpeed calls it after every pass."""
        if self.is_gradient_accumulation_boundary():
            self.reduce_gradients()

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradients, a float32 scalar. Collective."""
        counted = []
        for number, params in enumerate(self.params_in_partition):
            grads = self.averaged_gradients[number]
            grads = (grad for grad in grads if not getattr(grad, "_zero_padding", False))
            counted += [g for g, p in zip(grads, params, strict=False) if p in self._counted]
        groups, device = [self._mesh.dense, self._mesh.model], self.bit16_groups_flat[0].device
        # Reduce one number for all groups, since pipeline stages have different groups.
        return norm_of_groups([counted], torch.float32, torch.float32, groups, device)

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return :meth:`norm`. Called by DeepSpeed's step."""
        return self.norm()

    def update_by(self, step: Callable[[], None]) -> None:
        """Make :meth:`step` call this function instead of DeepSpeed's step."""
        self._own_step = step

    def step(self, closure: None = None) -> None:
        """Update the weights with the :meth:`update_by` function or DeepSpeed's step."""
        if self._own_step is None:
            super().step(closure)
        else:
            self._global_grad_norm = None  # DeepSpeed's value if it computes none
            self._own_step()

    def _optimizer_step(self, group_no: int) -> None:
        """Update one parameter group; DeepSpeed's step calls this for each group in turn. Groups
        with the same ``together`` are updated with the last of them; until then their gradients are
        stored, since DeepSpeed drops them."""
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
        for number in same:
            mains[number].grad = None
            self.own_part(number).data.copy_(mains[number].data)
        self._lazy_init_hp_params_optimizer_state()

    def _replicas(self, number: int) -> Group:
        """Return the ranks that share a parameter group."""
        return self._mesh.replicas(shard_of(self.bit16_groups[number][0]))

    def own_part(self, number: int) -> Tensor:
        """Return the shard of a parameter group's weights that this process updates, flat."""
        return self.parallel_partitioned_bit16_groups[number][self._replicas(number).rank]

    def start_gather(self, number: int) -> None:
        """Start to all-gather a parameter group's updated weights."""
        flat, group = self.bit16_groups_flat[number], self._replicas(number)
        if group.size > 1:
            part = self.own_part(number)
            self._arriving[number] = all_gather_flat(flat, part, group=group.handle, async_op=True)

    def await_weights(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until updated weights of these parameter groups, or of all, have arrived."""
        for number in self._arriving.keys() & (self._order if numbers is None else numbers):
            self._arriving.pop(number).wait()

    def forget_gradients(self) -> None:
        """Discard a step's gradients before its update."""
        self.reduction.drop()
        for number in range(len(self.bit16_groups)):
            self.averaged_gradients[number] = self.all_grad_tensors[number] = None

    def destroy(self) -> None:
        """Remove the hooks. Called when the engine is closed."""
        self.reduction.close()
        super().destroy()


def sum_in_place(params: Iterable[nn.Parameter], wrapper: Any) -> None:
    """Accumulate gradients of matrices where they are computed (:mod:`megatron.kernels.sums`),
    unless ``wrapper`` handles each micro batch."""
    if hasattr(wrapper, "reduction"):
        wrapper.reduction.sum_in_place()
    elif not isinstance(wrapper, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        for param in params:
            if param.dim() == 2:
                GradientSum(param)
