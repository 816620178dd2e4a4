"""Replaces parts of DeepSpeed where :mod:`megatron.engine.deepspeed_replacements` allows it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import compiler
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as ds_groups
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.deepspeed_json import Json, get, offloads, stage_of
from megatron.engine.deepspeed_replacements import (
    FEW_GROUPS,
    FEWER_REPLICAS,
    FEWER_REPLICAS_3,
    FP16_ON_CPUS,
    GUARD_OF_PARTITIONS,
    MUON,
    NO_COMPILER,
    NO_COPIES,
    NO_OPERATORS,
    OWN_REDUCTION,
    OWN_SCHEDULES,
    QUEUED_PARTITIONED_3,
    QUEUED_UNPARTITIONED,
    SCALE_GROWS_LATER,
    SUMS_IN_FP32,
    UNPARTITIONED_FP16,
    WHOLE_BLOCKS,
    made,
    require,
)
from megatron.engine.update.optimizer import EXPERTS
from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.shard import shard_of

logger = logging.getLogger(__name__)


def refuse_what_is_wrong(stage: int, sums_in_fp32: bool) -> None:
    """Raise ConfigError if this DeepSpeed version computes incorrectly what the run needs.
    ``sums_in_fp32`` tells whether DeepSpeed sums gradients in float32."""
    if stage == 3:
        require(GUARD_OF_PARTITIONS)
    if sums_in_fp32:
        require(SUMS_IN_FP32)


def start_without_compiler() -> None:
    """Make DeepSpeed start without compiling anything and without importing torch's compiler."""
    if made(NO_OPERATORS):
        # Reading the old value would search for the compilers and libraries of all operators.
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if made(NO_COMPILER):
        # Replaces torch.compile, as DeepSpeed does itself for a torch without a compiler.
        with _replaced(compiler, "compile", lambda: compiler.dummy_decorator):
            importlib.import_module(MUON)


def allow_fp16() -> None:
    if made(FP16_ON_CPUS):
        get_accelerator().is_fp16_supported = lambda: True


@contextmanager
def sharing_groups(handles: Mapping[tuple[int, ...], Any]) -> Iterator[None]:
    """Within this context, give DeepSpeed existing process groups, keyed by their ranks, instead of
    new ones. Every rank must pass the same keys, including those of groups without this rank."""
    # DeepSpeed's own function loops without end on torch's world group.
    vars(deepspeed.comm)["get_all_ranks_from_group"] = dist.get_process_group_ranks
    if not made(FEW_GROUPS):
        yield
        return
    make, known = TorchBackend.new_group, dict(handles)

    def shared(backend: Any, ranks: Iterable[int]) -> Any:
        key = tuple(ranks)
        if key not in known:
            known[key] = make(backend, list(key))
        return known[key]

    with _replaced(TorchBackend, "new_group", shared):
        yield


def take_out(engine: Any, replicas: int) -> None:
    """Turn off DeepSpeed's gradient all-reduce if there is only one data-parallel rank."""
    partitioned = isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
    if replicas == 1 and not partitioned and made(NO_COPIES):
        engine.buffered_allreduce_fallback = _nothing


def reduces(settings: Json, config: RunConfig) -> bool:
    """Return whether this trainer reduces the gradients instead of DeepSpeed. Raises ConfigError if
    the run depends on that, but it was not tested with this version of DeepSpeed."""
    stage = stage_of(settings)
    if stage not in (1, 2) or offloads(settings, "offload_optimizer"):
        return False
    precision, pipelined = config.precision, config.parallel.pipeline_model_parallel_size > 1
    in_fp32 = precision.bf16 and precision.accumulate_allreduce_grads_in_fp32
    if precision.states is not None or (pipelined if stage == 2 else in_fp32):
        require(OWN_REDUCTION)
    return made(OWN_REDUCTION)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute to another value within this context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def own_reduction(make: Callable[..., Any] | None) -> AbstractContextManager[None]:
    """Make an engine built within this context create its ZeRO 1 or 2 optimizer with ``make``,
    which gets DeepSpeed's arguments. None keeps DeepSpeed's optimizer."""
    zero = DeepSpeedZeroOptimizer.__name__
    return nullcontext() if make is None else _replaced(ds_engine, zero, make)


def fp16_optimizer(config: RunConfig, mesh: Mesh) -> AbstractContextManager[None]:
    """Make an engine built within this context use this trainer's optimizer for fp16 at stage 0,
    since DeepSpeed's is wrong. Raises ConfigError if it cannot be replaced in this version."""
    if not config.precision.fp16 or config.engine.zero_stage > 0:
        return nullcontext()
    require(UNPARTITIONED_FP16)
    from megatron.engine.update.unpartitioned_fp16 import UnpartitionedFp16Optimizer

    def configure(engine: Any, optimizer: Any, _: Any) -> Any:
        return UnpartitionedFp16Optimizer(engine, optimizer, config=config, mesh=mesh)

    return _replaced(DeepSpeedEngine, "_configure_fp16_optimizer", configure)


@contextmanager
def fewer_replicas_apart(
    params: Collection[nn.Parameter], mesh: Mesh, stage: int
) -> Iterator[None]:
    """Make an engine built within this context, at any stage but 3, sum the gradients of ``params``
    over these parameters' own replicas, divide them by the number of replicas of dense layers, and
    partition them among their own replicas. All of ``params`` must have the same replicas."""
    if not params or stage == 3:
        yield
        return
    require(FEWER_REPLICAS)
    for param in params:
        param.allreduce, param.group_name = False, EXPERTS  # type: ignore[attr-defined]
    replicas = mesh.replicas(shard_of(next(iter(params))))
    # Kept as long as the engine exists, since it uses the group in every step.
    vars(ds_groups)["_EXPERT_DATA_PARALLEL_GROUP"] = {EXPERTS: replicas.handle}
    vars(ds_groups)["_EXPERT_PARALLEL_GROUP"] = {EXPERTS: mesh.group("expert").handle}
    configure = DeepSpeedEngine._configure_distributed_model

    def configure_with_experts(engine: Any, model: nn.Module) -> None:
        configure(engine, model)
        engine.has_moe_layers = any(param.requires_grad for param in params)

    with _replaced(DeepSpeedEngine, "_configure_distributed_model", configure_with_experts):
        yield


def partition_among_replicas(init: Any, mesh: Mesh) -> None:
    """Make ``zero.Init`` partition each parameter among its own replicas."""
    convert = init._convert_to_deepspeed_param

    def convert_among_replicas(param: nn.Parameter) -> None:
        replicas = mesh.replicas(shard_of(param))
        if replicas.size < mesh.dense.size:
            require(FEWER_REPLICAS_3)
            param.ds_zero_partition_process_group = replicas.handle  # type: ignore[attr-defined]
        convert(param)

    init._convert_to_deepspeed_param = convert_among_replicas


def measure_fewer_replicas(wrapper: Any, params: Collection[nn.Parameter], mesh: Mesh) -> None:
    """Make DeepSpeed's own steps at stages 1 to 3 count the gradients of these parameters only once
    in the norm, and make stage 3 divide them by the number of replicas of dense layers."""
    if not params:
        return
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper._average_expert_grad_norms = _nothing
    elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        apart, along = set(params), mesh.group("expert").handle
        wrapper._autoep_expert_parallel_group = lambda of: along if of and of[0] in apart else None
        wrapper._grad_norm_counts_every_rank = lambda params, process_group: False


def guard(wrapper: Any) -> None:
    """Make ZeRO 1 and 2 skip a step with non-finite gradients, in every dtype. DeepSpeed 0.19.0
    does so only in half precision; later versions decide by the norm."""
    looks_at_norm = "compute_grad_norm" in DeepSpeedZeroConfig.model_fields
    if isinstance(wrapper, DeepSpeedZeroOptimizer) and not looks_at_norm:
        wrapper.check_grad_overflow = True


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a DeepSpeed method that is not needed."""


def defer_scale_growth(wrapper: Any) -> Callable[[], None]:
    """Make a ZeRO optimizer raise its dynamic loss scale after a good step instead of within it.
    Return a function to call after every step that was not skipped. Raises ConfigError if
    DeepSpeed's own code is wrong and cannot be replaced in this version."""
    update = getattr(wrapper, "_update_scale", None)
    if update is None or not wrapper.dynamic_loss_scale:
        return lambda: None
    require(SCALE_GROWS_LATER)

    def on_overflow_only(has_overflow: bool = False) -> None:
        if has_overflow:
            update(True)

    wrapper._update_scale = on_overflow_only
    return lambda: update(False)


def keep_smallest_scale(wrapper: Any) -> Callable[[], bool]:
    """Keep a dynamic loss scale at its minimum, where DeepSpeed would raise a bare Exception.
    Return a function that tells whether the next overflow would need a scale below the minimum."""
    scaler: Any = getattr(wrapper, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return lambda: False
    scaler.raise_error_at_min_scale = False
    return lambda: (
        scaler.cur_scale <= scaler.min_scale and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
    )


def queues(stage: int) -> bool:
    """Return whether this trainer can replace DeepSpeed's norm and clipping at a ZeRO stage."""
    kinds = (QUEUED_UNPARTITIONED, OWN_REDUCTION, OWN_REDUCTION, QUEUED_PARTITIONED_3)
    return made(kinds[stage])


def leave_norm_to_us(settings: Json) -> None:
    """Edit ``settings`` to turn off DeepSpeed's gradient norm, clipping and overflow check."""
    settings["gradient_clipping"] = 0.0
    if get(settings, "bf16.enabled"):
        settings["bf16"]["check_grad_overflow"] = False


def take_clipping_over(
    wrapper: DeepSpeedZeroOptimizer_Stage3, clip: Callable[[Sequence[Tensor]], None]
) -> None:
    """Replace stage 3's norm and clipping by ``clip``, which scales flat gradients in place."""
    # DeepSpeed's step reads the norms on the CPU; a constant avoids waiting for the device.
    wrapper._get_norm_groups = lambda: [1.0]
    wrapper.unscale_and_clip_grads = lambda group, norm: clip(
        [wrapper.fp32_partitioned_groups_flat[group].grad]
    )


def drop_gradients(optimizer: Any) -> None:
    """Discard a step's gradients before the update, as DeepSpeed does after an overflow."""
    if hasattr(optimizer, "reduction"):
        optimizer.forget_gradients()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for number in range(len(optimizer.bit16_groups)):
            optimizer._release_preflattened_grad_buffers(number)
            optimizer.averaged_gradients[number] = None
            optimizer.all_grad_tensors[number] = None
        optimizer.micro_step_id = -1  # before the first micro batch of a step
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer.local_overflow = False
        optimizer._epilogue_ran_this_backward = False
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
        else:
            optimizer.averaged_gradients = {}
    optimizer.zero_grad(set_to_none=True)


class PlacedModule(PipelineModule):
    """DeepSpeed's pipeline module with arbitrary stage boundaries and several stages per process.
    ``bounds`` has the index of each stage's first layer and then the number of layers. ``owner``
    returns a stage's pipeline rank. ``stage_modules`` has this process's layers, by the index of
    their stage's first layer. Raises ConfigError if not tested with this version of DeepSpeed."""

    def __init__(
        self,
        layers: Sequence[Any],
        topology: Any,
        bounds: list[int],
        stages: Iterable[int],
        owner: Callable[[int], int],
    ) -> None:
        require(OWN_SCHEDULES)
        # DeepSpeed's constructor calls the methods below, which need these.
        self._bounds, self._stages, self._owner = bounds, stages, owner
        super().__init__(layers, topology=topology)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._bounds

    def stage_owner(self, layer_idx: int) -> int:
        stage = max(s for s, start in enumerate(self._bounds[:-1]) if start <= layer_idx)
        return self._owner(stage)

    def _build(self) -> None:
        self.stage_modules: dict[int, list[nn.Module]] = {}
        for stage in self._stages:
            begin, end = self._bounds[stage], self._bounds[stage + 1]
            self._set_bounds(begin, end)
            self.forward_funcs: list[nn.Module] = []
            super()._build()
            self.stage_modules[begin] = self.forward_funcs

    def _synchronize_tied_weights(self) -> None:
        """Do nothing: copies of a tied layer have the same name, and thus the same initial
        values."""

    def save_state_dict(self, *args: Any, **options: Any) -> None:
        """Save the layers of all stages under their indices. DeepSpeed's method saves one stage."""
        before = self.forward_funcs
        for first, layers in self.stage_modules.items():
            self._set_bounds(first, first + len(layers))
            self.forward_funcs = layers
            super().save_state_dict(*args, **options)
        # The state after _build: the last stage's layers.
        assert self.forward_funcs is before


def outlast_monitor(engine: Any) -> None:
    """Prevent errors in DeepSpeed's own metric writers (``tensorboard`` and others in its JSON),
    such as a full disk, from ending a run."""
    monitor = getattr(engine, "monitor", None)
    if monitor is None or not monitor.enabled:
        return
    write = monitor.write_events

    def write_events(*events: Any, **options: Any) -> None:
        try:
            write(*events, **options)
        except Exception as error:  # every library has its own error classes
            logger.warning(
                "DeepSpeed's monitor cannot write (%s); training continues without it", error
            )
            monitor.write_events = lambda *events, **options: None

    monitor.write_events = write_events


@contextmanager
def fetching_whole(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Make a ZeRO 3 engine built within this context all-gather each of these blocks as a whole."""
    if not made(WHOLE_BLOCKS):
        yield
        return
    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
    with _replaced(stage3, "z3_leaf_parameter", lambda param: False):
        yield


def partition_late(model: nn.Module) -> None:
    """Partition parameters added to modules after construction. Called within ``zero.Init``."""
    params = list(model.parameters())
    late = [param for param in params if not hasattr(param, "ds_id")]
    if late:
        first = next(param for param in params if hasattr(param, "ds_id"))
        first.convert_to_zero_parameters(param_list=late)  # type: ignore[attr-defined]


def partition_range(param: nn.Parameter, data: Group) -> tuple[int, int]:
    """Return this rank's range [start, end) of a flattened parameter at ZeRO stage 3."""
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = min(data.rank * size, param.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]


def set_partition(param: nn.Parameter, values: Tensor) -> None:
    param.ds_tensor.data[: values.numel()].copy_(values)  # type: ignore[attr-defined]
    # hpZ keeps a second copy, now outdated. Without one DeepSpeed makes a new copy.
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]
