"""Everything that is replaced inside DeepSpeed, where :mod:`megatron.engine.deepspeed_replacements`
says that it may be."""

from __future__ import annotations

import importlib.util
import json
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

from megatron.config import ConfigError, RunConfig
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
    """Raises ConfigError if this run needs what some DeepSpeed versions compute incorrectly;
    ``sums_in_fp32``: DeepSpeed sums gradients in float32."""
    if stage == 3:
        require(GUARD_OF_PARTITIONS)
    if sums_in_fp32:
        require(SUMS_IN_FP32)


def start_without_compiler() -> None:
    """Makes DeepSpeed start without compiling anything, and without torch's compiler."""
    if made(NO_OPERATORS):
        # Not updated: reading the old value searches compilers and libraries for all operators.
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if made(NO_COMPILER):
        # DeepSpeed's own decorator for a torch without a compiler replaces torch.compile.
        with _replaced(compiler, "compile", lambda: compiler.dummy_decorator):
            importlib.import_module(MUON)


def allow_fp16() -> None:
    if made(FP16_ON_CPUS):
        get_accelerator().is_fp16_supported = lambda: True


@contextmanager
def sharing_groups(handles: Mapping[tuple[int, ...], Any]) -> Iterator[None]:
    """Gives DeepSpeed the groups that exist, by their ranks, where it would make others inside.
    Every rank must have the same keys, of groups of which it is no member too."""
    # DeepSpeed's own counts the ranks of torch's world group without end.
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
    """Removes work without effect from DeepSpeed's engine with this number of data-parallel
    ranks."""
    partitioned = isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
    if replicas == 1 and not partitioned and made(NO_COPIES):
        engine.buffered_allreduce_fallback = _nothing


def reduces(settings: Json, config: RunConfig) -> bool:
    """True if this trainer reduces the gradients, and not DeepSpeed. Raises ConfigError if this is
    needed, and was not tested with this DeepSpeed."""
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
    """Gives an attribute another value inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def own_reduction(make: Callable[..., Any] | None) -> AbstractContextManager[None]:
    """Makes an engine that is built inside get its optimizer of ZeRO 1 or 2 from ``make``, which
    takes DeepSpeed's arguments; None for DeepSpeed's."""
    zero = DeepSpeedZeroOptimizer.__name__
    return nullcontext() if make is None else _replaced(ds_engine, zero, make)


def fp16_optimizer(config: RunConfig, mesh: Mesh) -> AbstractContextManager[None]:
    """Makes an engine that is built inside get this trainer's optimizer for fp16 at stage 0. Raises
    ConfigError if DeepSpeed's own, which is wrong, cannot be replaced in this version."""
    if not config.precision.fp16 or config.engine.zero_stage > 0:
        return nullcontext()
    require(UNPARTITIONED_FP16)
    from megatron.engine.update.unpartitioned_fp16 import UnpartitionedFp16Optimizer

    def configure(engine: Any, optimizer: Any, _: Any) -> Any:
        return UnpartitionedFp16Optimizer(engine, optimizer, config=config, mesh=mesh)

    return _replaced(DeepSpeedEngine, "_configure_fp16_optimizer", configure)


def check_fewer_replicas(settings: Json, stage: int) -> None:
    """Raises ConfigError where DeepSpeed does something else with parameters that have fewer
    replicas than others."""
    defaults: dict[str, Any] = {}
    if stage in (1, 2) and offloads(settings, "offload_optimizer"):
        defaults = {"contiguous_gradients": True, "reduce_scatter": True}
    elif stage == 3:
        defaults = {"zero_hpz_partition_size": 1, "zero_quantized_gradients": False}
    for name, default in defaults.items():
        value = get(settings, f"zero_optimization.{name}")
        if value not in (None, default):
            raise ConfigError(
                f"zero_optimization.{name} {json.dumps(value)} of the DeepSpeed JSON: experts that "
                f"are divided over ranks need {json.dumps(default)} at ZeRO {stage}; leave it out"
            )


@contextmanager
def fewer_replicas_apart(
    params: Collection[nn.Parameter], mesh: Mesh, stage: int
) -> Iterator[None]:
    """Makes an engine that is built inside, at any stage but 3, sum the gradients of these
    parameters over their own replicas, divide by the number of all, and partition them among their
    own. All of them have the same replicas."""
    if not params or stage == 3:
        yield
        return
    require(FEWER_REPLICAS)
    for param in params:
        param.allreduce, param.group_name = False, EXPERTS  # type: ignore[attr-defined]
    replicas = mesh.replicas(shard_of(next(iter(params))))
    # Kept while the engine exists: it uses the group in every step.
    vars(ds_groups)["_EXPERT_DATA_PARALLEL_GROUP"] = {EXPERTS: replicas.handle}
    vars(ds_groups)["_EXPERT_PARALLEL_GROUP"] = {EXPERTS: mesh.group("expert").handle}
    configure = DeepSpeedEngine._configure_distributed_model

    def configure_with_experts(engine: Any, model: nn.Module) -> None:
        configure(engine, model)
        engine.has_moe_layers = any(param.requires_grad for param in params)

    with _replaced(DeepSpeedEngine, "_configure_distributed_model", configure_with_experts):
        yield


def partition_among_replicas(init: Any, mesh: Mesh) -> None:
    """Makes ``zero.Init`` partition each parameter among its replicas."""
    convert = init._convert_to_deepspeed_param

    def convert_among_replicas(param: nn.Parameter) -> None:
        replicas = mesh.replicas(shard_of(param))
        if replicas.size < mesh.dense.size:
            require(FEWER_REPLICAS_3)
            param.ds_zero_partition_process_group = replicas.handle  # type: ignore[attr-defined]
        convert(param)

    init._convert_to_deepspeed_param = convert_among_replicas


def measure_fewer_replicas(wrapper: Any, params: Collection[nn.Parameter], mesh: Mesh) -> None:
    """Makes DeepSpeed's own steps at stages 1 to 3 count the gradients of these parameters once in
    the norm, and stage 3 divide them by the number of all replicas."""
    if not params:
        return
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper._average_expert_grad_norms = _nothing
    elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        apart, along = set(params), mesh.group("expert").handle
        wrapper._autoep_expert_parallel_group = lambda of: along if of and of[0] in apart else None
        wrapper._grad_norm_counts_every_rank = lambda params, process_group: False


def guard(wrapper: Any) -> None:
    """Makes ZeRO 1 and 2 skip a step with gradients that are not finite, in every dtype: DeepSpeed
    0.19.0 does so only in half precision, later versions by the norm."""
    looks_at_norm = "compute_grad_norm" in DeepSpeedZeroConfig.model_fields
    if isinstance(wrapper, DeepSpeedZeroOptimizer) and not looks_at_norm:
        wrapper.check_grad_overflow = True


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a method without effect."""


def defer_scale_growth(wrapper: Any) -> Callable[[], None]:
    """Makes a ZeRO optimizer change its dynamic loss scale after a good step instead of within it;
    returns the update to call after every step that was not skipped. Raises ConfigError if
    DeepSpeed's own way is wrong and cannot be replaced in this version."""
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
    """Makes a dynamic loss scale stay at its minimum when it cannot fall, where DeepSpeed raises a
    bare Exception; returns whether the next overflow will be such a one."""
    scaler: Any = getattr(wrapper, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return lambda: False
    scaler.raise_error_at_min_scale = False
    return lambda: (
        scaler.cur_scale <= scaler.min_scale and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
    )


def queues(stage: int) -> bool:
    """True if norm and clipping of a ZeRO stage can be taken over from DeepSpeed."""
    kinds = (QUEUED_UNPARTITIONED, OWN_REDUCTION, OWN_REDUCTION, QUEUED_PARTITIONED_3)
    return made(kinds[stage])


def leave_norm_to_us(settings: Json) -> None:
    """Sets DeepSpeed's keys for neither norm, nor clipping, nor a check for infinities."""
    settings["gradient_clipping"] = 0.0
    if get(settings, "bf16.enabled"):
        settings["bf16"]["check_grad_overflow"] = False


def take_clipping_over(
    wrapper: DeepSpeedZeroOptimizer_Stage3, clip: Callable[[Sequence[Tensor]], None]
) -> None:
    """Replaces norm and clipping of stage 3; ``clip`` scales flat gradients."""
    # Its step reads the norms that it gets: here a constant on the CPU.
    wrapper._get_norm_groups = lambda: [1.0]
    wrapper.unscale_and_clip_grads = lambda group, norm: clip(
        [wrapper.fp32_partitioned_groups_flat[group].grad]
    )


def drop_gradients(optimizer: Any) -> None:
    """Forgets the gradients of a step before its update, as DeepSpeed does after an overflow."""
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
    """DeepSpeed's pipeline module with arbitrary bounds, and several stages in a process.
    ``bounds`` are where each stage starts, and the number of layers; ``owner`` gives the pipeline
    rank of a stage; ``stage_modules`` are this process's, by the index of their first layer. Raises
    ConfigError if this version of DeepSpeed was not tested with it."""

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
        """Nothing to do: copies of a tied layer have the same canonical name, and with it the same
        initial values."""

    def save_state_dict(self, *args: Any, **options: Any) -> None:
        """Saves all stages' layers, each under its index; DeepSpeed's method saves one stage."""
        before = self.forward_funcs
        for first, layers in self.stage_modules.items():
            self._set_bounds(first, first + len(layers))
            self.forward_funcs = layers
            super().save_state_dict(*args, **options)
        # As _build has left them: the last stage's.
        assert self.forward_funcs is before


def outlast_monitor(engine: Any) -> None:
    """Keeps DeepSpeed's own writers (``tensorboard`` and others of its JSON) from ending a run, as
    on a full disk."""
    monitor = getattr(engine, "monitor", None)
    if monitor is None or not monitor.enabled:
        return
    write = monitor.write_events

    def write_events(*events: Any, **options: Any) -> None:
        try:
            write(*events, **options)
        except Exception as error:  # each library has its own classes
            logger.warning(
                "DeepSpeed's monitor cannot write (%s); training continues without it", error
            )
            monitor.write_events = lambda *events, **options: None

    monitor.write_events = write_events


@contextmanager
def fetching_whole(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Make a ZeRO 3 engine built within this context fetch each of these blocks as a whole."""
    if not made(WHOLE_BLOCKS):
        yield
        return
    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
    with _replaced(stage3, "z3_leaf_parameter", lambda param: False):
        yield


def partition_late(model: nn.Module) -> None:
    """Partitions parameters that modules were given after they were built; called within
    ``zero.Init``."""
    params = list(model.parameters())
    late = [param for param in params if not hasattr(param, "ds_id")]
    if late:
        first = next(param for param in params if hasattr(param, "ds_id"))
        first.convert_to_zero_parameters(param_list=late)  # type: ignore[attr-defined]


def partition_range(param: nn.Parameter, data: Group) -> tuple[int, int]:
    """This rank's partition of a flattened parameter at ZeRO stage 3: [start, end)."""
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = min(data.rank * size, param.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]


def set_partition(param: nn.Parameter, values: Tensor) -> None:
    param.ds_tensor.data[: values.numel()].copy_(values)  # type: ignore[attr-defined]
    # hpZ keeps a second copy of earlier values; without it DeepSpeed makes a new one.
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]
