"""Replacements inside DeepSpeed, each with its reason and a test, and the versions they support.

A replacement is made for these versions only, and where the code that it replaces looks as
expected. Elsewhere DeepSpeed's own path runs, which a line reports; where that would be wrong, the
run is refused. Each replacement's test compares it with DeepSpeed's own path, or with the right
numbers where DeepSpeed has none.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import compiler
from deepspeed.runtime import utils as zero_utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.config import ConfigError
from megatron.engine.deepspeed_json import Json, get, offloads
from megatron.parallel.mesh import Group
from megatron.util.processes import is_main_process

FIRST, LAST = "0.19.0", "0.19.8"
"""The first and the last version of DeepSpeed that the replacements were tested with."""


class Replacement(NamedTuple):
    """Something that is done in another way than DeepSpeed does it.

    Attributes:
        what: its name, which completes "Without ..." in messages.
        otherwise: the consequence for a user without it.
        test: compares it with what it replaces.
        looks: whether the replaced code looks as it did when this was written.
    """

    what: str
    otherwise: str
    test: str
    looks: Callable[[], bool]


def _takes(owner: Any, name: str, *parameters: str) -> bool:
    function = getattr(owner, name, None)
    if function is None:
        return False
    return tuple(inspect.signature(function).parameters) == parameters


def _has(owner: Any, *names: str) -> bool:
    return all(hasattr(owner, name) for name in names)


_TESTS = "tests/distributed/engine"
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"

NO_OPERATORS = Replacement(
    # Built when torch.distributed starts: half a minute, and an error without a compiler.
    "leaving out DeepSpeed's operator for collectives on CPUs",
    "it is compiled when a run starts, which needs a C++ compiler and ninja",
    f"{_TESTS}/test_deepspeed_patches.py::test_against_collectives_that_are_compiled",
    # Newer versions make the list on first use.
    lambda: "__compatible_ops__" in vars(deepspeed.ops) or _has(deepspeed.ops, "__getattr__"),
)
NO_COMPILER = Replacement(
    # ZeRO imports Muon to check whether it is the optimizer, which it never is here, and passes it
    # to torch.compile, whose import takes as much CPU time as that of torch.
    "keeping torch's compiler out when DeepSpeed's Muon is imported",
    "runs start more slowly",
    "tests/unit/engine/update/test_optimizer.py::test_a_run_imports_nothing_heavy",
    lambda: (
        _has(compiler, "compile", "dummy_decorator")
        and importlib.util.find_spec(_MUON) is not None
        and _MUON not in sys.modules
    ),
)
FP16_ON_CPUS = Replacement(
    # DeepSpeed refuses fp16 on CPUs without instructions for it; torch supports it on all.
    "fp16 on every CPU",
    "DeepSpeed refuses --fp16 on CPUs without instructions for it",
    f"{_TESTS}/test_precision.py::test_fp16_follows_fp32",
    lambda: _takes(get_accelerator(), "is_fp16_supported"),
)
NO_COPIES = Replacement(
    # With one data-parallel rank there is nothing to average. Nevertheless ZeRO 1 and 2 copy every
    # gradient into a bucket, divide it by one, reduce it over one rank, and copy it back and into a
    # partition; stage 0 flattens, reduces and copies back. All of that is the identity.
    "leaving out copies and reductions of gradients among one data-parallel rank",
    "steps are slower and take more memory",
    f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed",
    lambda: (
        _takes(
            DeepSpeedEngine, "buffered_allreduce_fallback", "self", "grads", "elements_per_buffer"
        )
        and _has(DeepSpeedZeroOptimizer, "buffered_reduce_fallback")
    ),
)
NO_SECOND_VIEWS = Replacement(
    # After every step ZeRO 1 and 2 set every parameter to the view that it has already.
    "keeping the parameters' views after a step (ZeRO 1 and 2)",
    "steps are slower",
    f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed",
    lambda: _takes(DeepSpeedZeroOptimizer, "_update_model_bit16_weights", "self", "group_index"),
)
NO_ZERO_GRADIENTS = Replacement(
    # ZeRO 1 and 2 make gradients of zeros, 4 bytes per number of the partition, for Adagrad's
    # states and for offloading, and drop them at once otherwise: the largest peak of a start.
    "leaving out gradients of zeros when the optimizer is built (ZeRO 1 and 2)",
    "a start takes 4 bytes more for each number that a rank updates",
    f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed",
    lambda: _takes(DeepSpeedZeroOptimizer, "initialize_optimizer_states", "self"),
)
SCALE_GROWS_LATER = Replacement(
    # DeepSpeed doubles the dynamic scale before it divides the gradients by it, so that a step in
    # which the scale grows would use half the gradients.
    "growth of the dynamic loss scale after a step instead of within it",
    "a step in which it grows would use half the gradients: give a --loss-scale, or use --bf16",
    f"{_TESTS}/test_precision.py::test_growing_loss_scale_changes_nothing",
    lambda: all(
        _takes(kind, "_update_scale", "self", "has_overflow")
        for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    ),
)
_QUEUED = "norm, clipping and the guard against infinities on the device"
_WAITS = "the CPU synchronizes with the device in every step"
_AGAINST_DEEPSPEED = f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed"
QUEUED_UNPARTITIONED = Replacement(f"{_QUEUED} (stage 0)", _WAITS, _AGAINST_DEEPSPEED, lambda: True)
QUEUED_PARTITIONED = Replacement(
    f"{_QUEUED} (ZeRO 1 and 2)",
    _WAITS,
    _AGAINST_DEEPSPEED,
    lambda: (
        "compute_grad_norm" in DeepSpeedZeroConfig.model_fields
        and _takes(DeepSpeedZeroOptimizer, "step", "self", "closure")
        and _takes(
            DeepSpeedZeroOptimizer, "_release_preflattened_grad_buffers", "self", "group_idx"
        )
        and _takes(DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state", "self")
        and _has(zero_utils, "all_gather_dp_groups")
    ),
)
QUEUED_ACCUMULATED = Replacement(
    f"{_QUEUED} (ZeRO 1 with sums in fp32)",
    _WAITS,
    f"{_AGAINST_DEEPSPEED}_with_sums_in_fp32",
    lambda: (
        _takes(BF16_Optimizer, "step", "self", "closure")
        and _takes(BF16_Optimizer, "update_lp_params", "self")
        and _takes(BF16_Optimizer, "clear_hp_grads", "self")
        and _takes(BF16_Optimizer, "_lazy_init_hp_params_optimizer_state", "self")
    ),
)
QUEUED_PARTITIONED_3 = Replacement(
    f"{_QUEUED} (ZeRO 3)",
    _WAITS,
    _AGAINST_DEEPSPEED,
    # A decorator hides their parameters. Norms of groups must be numbers on the CPU.
    lambda: (
        _has(DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups", "unscale_and_clip_grads")
        and _has(stage3, "combine_grad_norm_groups")
    ),
)
WHOLE_BLOCKS = Replacement(
    # DeepSpeed's leaf modules: parameters of all layers inside are fetched at once, and hooks stay
    # around the block, which remains one graph when it is compiled. But a leaf module's gradients
    # are reduced by a hook on its inputs, which torch does not find in a LayerState: it would run
    # before there are gradients. They are reduced as they come instead, as those of other layers.
    "fetching the parameters of a block at once (ZeRO 3)",
    "those of every layer are fetched by themselves, and --torch-compile compiles them one by one",
    f"{_TESTS}/test_whole_blocks.py::test_same_bits_with_a_fetch_per_block",
    lambda: _has(stage3, "z3_leaf_parameter") and _has(deepspeed.utils, "set_z3_leaf_module"),
)
GUARD_OF_PARTITIONS = Replacement(
    # DeepSpeed 0.19.0 updates with any gradients; nothing here replaces that.
    "a guard against infinities at ZeRO 3",
    "gradients that are not finite would get into the weights: use --zero-stage 1 or 2",
    f"{_TESTS}/test_precision.py::test_nan_stops_with_step_and_samples",
    lambda: _has(stage3, "is_invalid_grad_norm", "combine_grad_norm_groups"),
)
SUMS_IN_FP32 = Replacement(
    # DeepSpeed 0.19.0 sums in half precision at stage 2, and checks no sums in fp16 at stage 1.
    "sums of gradients in float32",
    "the result would not be that: leave out --accumulate-allreduce-grads-in-fp32",
    f"{_TESTS}/test_precision.py::test_sums_in_fp32_are_nearer_to_fp32",
    lambda: "compute_grad_norm" in DeepSpeedZeroConfig.model_fields,
)
OWN_SCHEDULES = Replacement(
    # DeepSpeed's schedules have one stage per process, hidden states only, and 1F1B.
    "this trainer's pipeline schedules on DeepSpeed's pipeline engine",
    "no schedule runs: leave out --pipeline-model-parallel-size",
    f"{_TESTS}/test_pipeline.py::test_uneven_stages",
    lambda: (
        _takes(PipelineModule, "_partition_layers", "self", "method")
        and _takes(PipelineModule, "stage_owner", "self", "layer_idx")
        and _takes(PipelineModule, "_set_bounds", "self", "start", "stop")
        and _takes(PipelineModule, "_build", "self")
        and _takes(PipelineModule, "_synchronize_tied_weights", "self")
        and _takes(PipelineEngine, "_exec_reduce_grads", "self")
        and _takes(PipelineEngine, "_exec_optimizer_step", "self", "lr_kwargs")
        and _has(DeepSpeedEngine, "_backward_prologue", "_backward_epilogue")
    ),
)


@cache
def made(replacement: Replacement) -> bool:
    """Whether a replacement is made; if not, the main process reports it, once."""
    fault = _fault(replacement)
    if fault and is_main_process():
        print(f"{fault}. Without {replacement.what} {replacement.otherwise}", flush=True)
    return fault is None


def require(replacement: Replacement) -> None:
    """Refuses a run in which DeepSpeed's own path would be wrong. Raises ConfigError if the
    replacement was not tested with this DeepSpeed."""
    fault = _fault(replacement)
    if fault:
        raise ConfigError(
            f"{fault}. Without {replacement.what} {replacement.otherwise}; or install "
            f"deepspeed=={LAST}"
        )


def _fault(replacement: Replacement) -> str | None:
    version = deepspeed.__version__
    if not _number(FIRST) <= _number(version) <= _number(LAST):
        return f"DeepSpeed {version} is not one of {FIRST} to {LAST}, which this was tested with"
    return None if replacement.looks() else f"DeepSpeed {version} has unexpected code"


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def refuse_what_is_wrong(stage: int, grads_in_fp32: bool) -> None:
    """Raises ConfigError if this run needs what some DeepSpeed versions compute incorrectly."""
    if stage == 3:
        require(GUARD_OF_PARTITIONS)
    if grads_in_fp32:
        require(SUMS_IN_FP32)


def start_without_compiler() -> None:
    """Makes DeepSpeed start without compiling anything, and without torch's compiler."""
    if made(NO_OPERATORS):
        # Not updated: reading the old value searches compilers and libraries for all operators.
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if made(NO_COMPILER):
        # DeepSpeed's own decorator for a torch without a compiler replaces torch.compile.
        decorator = compiler.compile
        compiler.compile = lambda: compiler.dummy_decorator
        try:
            importlib.import_module(_MUON)
        finally:
            compiler.compile = decorator


def allow_fp16() -> None:
    if made(FP16_ON_CPUS):
        get_accelerator().is_fp16_supported = lambda: True


def keep_gradients_in_place(settings: Json, stage: int) -> None:
    """Sets DeepSpeed's keys for gradients that stay where the backward pass writes them; for one
    data-parallel rank. Offloaded optimizer state needs DeepSpeed's copies."""
    zero = settings.setdefault("zero_optimization", {})
    if stage in (1, 2) and not offloads(settings, "offload_optimizer") and made(NO_COPIES):
        zero["contiguous_gradients"] = False
        zero["overlap_comm"] = False


def take_out(engine: Any, replicas: int) -> None:
    """Removes work without effect from DeepSpeed's engine with this number of data-parallel
    ranks."""
    wrapper = engine.optimizer
    partitioned = isinstance(wrapper, DeepSpeedZeroOptimizer)
    if partitioned and made(NO_SECOND_VIEWS):
        wrapper._update_model_bit16_weights = _nothing
    if replicas > 1 or not made(NO_COPIES):
        return
    if not partitioned:
        engine.buffered_allreduce_fallback = _nothing
    elif not wrapper.contiguous_gradients:
        wrapper.buffered_reduce_fallback = _nothing


@contextmanager
def without_zero_gradients(unused: bool) -> Iterator[None]:
    """Makes ZeRO 1 and 2 build their optimizer inside without gradients of zeros, if those are
    ``unused``: with an Adam that makes its states in its first step, and nothing offloaded."""
    if not unused or not made(NO_ZERO_GRADIENTS):
        yield
        return
    initialize = DeepSpeedZeroOptimizer.initialize_optimizer_states
    DeepSpeedZeroOptimizer.initialize_optimizer_states = _nothing
    try:
        yield
    finally:
        DeepSpeedZeroOptimizer.initialize_optimizer_states = initialize


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


def queues(stage: int, grads_in_fp32: bool) -> bool:
    """Whether norm and clipping of a ZeRO stage can be taken over from DeepSpeed;
    ``grads_in_fp32``: bf16 gradients are summed in float32."""
    partitioned = QUEUED_ACCUMULATED if stage == 1 and grads_in_fp32 else QUEUED_PARTITIONED
    return made((QUEUED_UNPARTITIONED, partitioned, partitioned, QUEUED_PARTITIONED_3)[stage])


def leave_norm_to_us(settings: Json, stage: int, grads_in_fp32: bool) -> None:
    """Sets DeepSpeed's keys for neither norm, nor clipping, nor a check for infinities."""
    settings["gradient_clipping"] = 0.0
    if get(settings, "bf16.enabled"):
        settings["bf16"]["check_grad_overflow"] = False
    if stage == 2 or (stage == 1 and not grads_in_fp32):
        settings.setdefault("zero_optimization", {})["compute_grad_norm"] = False


def take_step_over(wrapper: Any, step: Callable[[], None]) -> None:
    """Replaces the step of a ZeRO optimizer of stage 1 or 2."""
    wrapper._global_grad_norm = None  # as DeepSpeed has it where it computes none
    wrapper.step = lambda closure=None: step()


def take_clipping_over(
    wrapper: DeepSpeedZeroOptimizer_Stage3, clip: Callable[[Sequence[Tensor]], None]
) -> None:
    """Replaces norm and clipping of stage 3; ``clip`` scales flat gradients."""
    # Its step reads the norms that it gets: here a constant on the CPU.
    wrapper._get_norm_groups = lambda: [1.0]
    wrapper.unscale_and_clip_grads = lambda group, norm: clip(
        [wrapper.fp32_partitioned_groups_flat[group].grad]
    )


def average_by(engine: Any, average: Callable[[], None]) -> None:
    """Replaces the averaging of an engine's gradients at stage 0: DeepSpeed's refuses float64, in
    which the layouts are compared."""
    assert _has(engine, "allreduce_gradients")
    engine.allreduce_gradients = lambda **_: average()


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


@contextmanager
def fetching_whole(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Makes a ZeRO 3 engine that is built inside fetch each of these blocks at once."""
    if not made(WHOLE_BLOCKS):
        yield
        return
    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
    delays_reduction = stage3.z3_leaf_parameter
    stage3.z3_leaf_parameter = lambda param: False
    try:
        yield
    finally:
        stage3.z3_leaf_parameter = delays_reduction


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
