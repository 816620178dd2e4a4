"""Replaceable parts of DeepSpeed: why each is replaced, the test that compares both versions, and
the tested versions of DeepSpeed. ``deepspeed_patches.py`` makes the replacements.

A replacement is made only for these versions, and only if the replaced code looks as expected.
Otherwise DeepSpeed's own code runs, and a line reports it. If the result would be wrong, the run is
refused instead. Where DeepSpeed's results are wrong, tests compare with the correct ones.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import compiler
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as ds_groups

from megatron.config import ConfigError
from megatron.util.processes import is_main_process

FIRST, LAST = "0.19.0", "0.19.8"
"""First and last version of DeepSpeed with which the replacements were tested."""


class Replacement(NamedTuple):
    """Replacement of a part of DeepSpeed by this project's own code.

    Attributes:
        what: name of the replacement, which completes "Without ..." in messages.
        otherwise: consequence for the user if the replacement is not made.
        test: test that compares the replacement with the original.
        looks: returns whether the replaced code still has the expected form.
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


def has(owner: Any, *names: str) -> bool:
    return all(hasattr(owner, name) for name in names)


_TESTS = "tests/distributed/engine"
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"

NO_OPERATORS = Replacement(
    # Otherwise built when torch.distributed starts: half a minute, or an error without a compiler.
    "leaving out DeepSpeed's operator for collectives on CPUs",
    "it is compiled when a run starts, which needs a C++ compiler and ninja",
    f"{_TESTS}/test_deepspeed_patches.py::test_against_collectives_that_are_compiled",
    # Newer versions create the list on first use.
    lambda: "__compatible_ops__" in vars(deepspeed.ops) or has(deepspeed.ops, "__getattr__"),
)
NO_COMPILER = Replacement(
    # ZeRO imports Muon only to check whether it is the optimizer, which is never the case. The
    # import passes Muon to torch.compile, which takes as much CPU time to import as torch itself.
    "keeping torch's compiler out when DeepSpeed's Muon is imported",
    "runs start more slowly",
    "tests/core/engine/update/test_optimizer.py::test_a_run_imports_nothing_heavy",
    lambda: (
        has(compiler, "compile", "dummy_decorator")
        and importlib.util.find_spec(MUON) is not None
        and MUON not in sys.modules
    ),
)
FP16_ON_CPUS = Replacement(
    # DeepSpeed refuses fp16 on CPUs without instructions for it; torch supports fp16 on all CPUs.
    "fp16 on every CPU",
    "DeepSpeed refuses --fp16 on CPUs without instructions for it",
    f"{_TESTS}/test_precision.py::test_fp16_follows_fp32",
    lambda: _takes(get_accelerator(), "is_fp16_supported"),
)
NO_COPIES = Replacement(
    # One data-parallel rank has nothing to average. Nevertheless stage 0 flattens, reduces and
    # copies back, without any effect.
    "leaving out copies and reductions of gradients among one data-parallel rank",
    "steps are slower and take more memory",
    f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed",
    lambda: _takes(
        DeepSpeedEngine, "buffered_allreduce_fallback", "self", "grads", "elements_per_buffer"
    ),
)
FEW_GROUPS = Replacement(
    # DeepSpeed's pipeline grid creates groups for ranks that already share one: five more
    # communicators per rank, each with hundreds of MB on a GPU, and without our timeout.
    "sharing process groups of the same ranks with DeepSpeed",
    "starts take longer, and more memory of GPUs",
    f"{_TESTS}/test_process_groups.py::test_no_group_is_made_twice",
    lambda: _takes(TorchBackend, "new_group", "self", "ranks"),
)
SCALE_GROWS_LATER = Replacement(
    # DeepSpeed doubles the dynamic scale before it divides the gradients by it, so that a step in
    # which the scale grows uses gradients of half their size.
    "growth of the dynamic loss scale after a step instead of within it",
    "a step in which it grows would use half the gradients: give a --loss-scale, or use --bf16",
    f"{_TESTS}/test_precision.py::test_growing_loss_scale_changes_nothing",
    lambda: all(
        _takes(kind, "_update_scale", "self", "has_overflow")
        for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    ),
)
UNPARTITIONED_FP16 = Replacement(
    # DeepSpeed scales the loss for its ZeRO optimizers only, but its fp16 optimizers of stage 0
    # divide gradients and norm by the scale, lack hysteresis, and begin with a zero update.
    "this trainer's optimizer for fp16 without ZeRO",
    "gradients would be divided by a loss scale that they do not have: use --zero-stage 1",
    f"{_TESTS}/test_unpartitioned_fp16.py::test_against_zero_1",
    lambda: (
        _takes(
            DeepSpeedEngine, "_configure_fp16_optimizer", "self", "optimizer", "low_precision_dtype"
        )
        and _takes(ZeROOptimizer, "__init__", "self")
        and _takes(ZeROOptimizer, "scale_if_loss", "self", "value")
        and has(loss_scaler, "CreateLossScaler", "DynamicLossScaler")
    ),
)
_QUEUED = "norm, clipping and the guard against infinities on the device"
_WAITS = "the CPU synchronizes with the device in every step"
_AGAINST_DEEPSPEED = f"{_TESTS}/test_async_optimizer_step.py::test_against_deepspeed"
QUEUED_UNPARTITIONED = Replacement(f"{_QUEUED} (stage 0)", _WAITS, _AGAINST_DEEPSPEED, lambda: True)
OWN_REDUCTION = Replacement(
    # DeepSpeed sums with all-reduce, which moves twice the bytes: at stage 1 after the last
    # backward pass, at stage 2 in every pass while the CPU waits. Its pipeline engine refuses stage
    # 2. For bf16 with float32 sums at stage 1 it keeps all sums on every rank.
    "this trainer's reduction of gradients (ZeRO 1 and 2)",
    "gradients are reduced after the backward pass, and as whole ones: use --zero-stage 3, or "
    "leave out --use-precision-aware-optimizer and --accumulate-allreduce-grads-in-fp32, and "
    "ZeRO 2 in pipelines",
    _AGAINST_DEEPSPEED,
    lambda: (
        has(ds_engine, "DeepSpeedZeroOptimizer")
        and _takes(DeepSpeedZeroOptimizer, "create_gradient_handling_hooks", "self")
        and _takes(DeepSpeedZeroOptimizer, "initialize_optimizer_states", "self")
        and _takes(DeepSpeedZeroOptimizer, "reduce_gradients", "self", "pipeline_parallel")
        and _takes(
            DeepSpeedZeroOptimizer, "overlapping_partition_gradients_reduce_epilogue", "self"
        )
        and _takes(DeepSpeedZeroOptimizer, "scaled_global_norm", "self", "norm_type")
        and _takes(DeepSpeedZeroOptimizer, "step", "self", "closure")
        and _takes(DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state", "self")
    ),
)
QUEUED_PARTITIONED_3 = Replacement(
    f"{_QUEUED} (ZeRO 3)",
    _WAITS,
    _AGAINST_DEEPSPEED,
    # A decorator hides the methods' parameters. Group norms must be numbers on the CPU.
    lambda: (
        has(DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups", "unscale_and_clip_grads")
        and has(stage3, "combine_grad_norm_groups")
    ),
)
WHOLE_BLOCKS = Replacement(
    # As DeepSpeed's leaf modules, blocks fetch all parameters inside at once, and hooks stay around
    # the block, which remains one graph when compiled. But a hook on a leaf module's inputs reduces
    # its gradients. torch does not find the inputs in a LayerState, so the hook would run before
    # gradients exist. As in other layers, each gradient is reduced when it is ready instead.
    "fetching the parameters of a block at once (ZeRO 3)",
    "those of every layer are fetched by themselves, and --torch-compile compiles them one by one",
    f"{_TESTS}/test_whole_blocks.py::test_same_bits_with_a_fetch_per_block",
    lambda: has(stage3, "z3_leaf_parameter") and has(deepspeed.utils, "set_z3_leaf_module"),
)
FEWER_REPLICAS = Replacement(
    # DeepSpeed creates its own groups of ranks, for its own expert layer. At stages 1 and 2 it also
    # averages norms that already cover all ranks.
    "this trainer's groups of ranks for experts (ZeRO 0 to 2)",
    "the gradients of experts would be averaged over the wrong ranks: use "
    "--expert-model-parallel-size 1",
    f"{_TESTS}/test_expert_axis.py::test_training_equals_one_process",
    lambda: (
        has(ds_groups, "_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")
        and _takes(DeepSpeedEngine, "_configure_distributed_model", "self", "model")
        and has(DeepSpeedEngine, "_reduce_expert_gradients")
        and _takes(DeepSpeedZeroOptimizer, "_average_expert_grad_norms", "self", "norm_groups")
        and has(DeepSpeedZeroOptimizer, "_configure_moe_settings")
        and has(BF16_Optimizer, "_configure_moe_settings")
    ),
)
FEWER_REPLICAS_3 = Replacement(
    # DeepSpeed partitions among separate groups for its own expert layer only. It does not support
    # parameters of an expert that tensor-parallel ranks share.
    "this trainer's groups of ranks for experts (ZeRO 3)",
    "experts would be partitioned among the wrong ranks: use --zero-stage 1 or 2, or "
    "--expert-model-parallel-size 1",
    f"{_TESTS}/test_expert_axis.py::test_training_equals_one_process",
    lambda: (
        _takes(DeepSpeedZeroOptimizer_Stage3, "_autoep_expert_parallel_group", "self", "params")
        and has(DeepSpeedZeroOptimizer_Stage3, "_grad_norm_counts_every_rank")
        and has(DeepSpeedZeroOptimizer_Stage3, "_gradient_averaging_world_size")
        and _takes(partition_parameters.Init, "_convert_to_deepspeed_param", "self", "param")
    ),
)
GUARD_OF_PARTITIONS = Replacement(
    # DeepSpeed 0.19.0 applies gradients that are not finite. Nothing here replaces that.
    "a guard against infinities at ZeRO 3",
    "gradients that are not finite would get into the weights: use --zero-stage 1 or 2",
    f"{_TESTS}/test_precision.py::test_nan_stops_with_step_and_samples",
    lambda: has(stage3, "is_invalid_grad_norm", "combine_grad_norm_groups"),
)
SUMS_IN_FP32 = Replacement(
    # DeepSpeed 0.19.0 sums in half precision at stage 2, and does not check fp16 sums at stage 1.
    "sums of gradients in float32",
    "the result would not be that: leave out --accumulate-allreduce-grads-in-fp32",
    f"{_TESTS}/test_precision.py::test_sums_in_fp32_are_nearer_to_fp32",
    lambda: "compute_grad_norm" in DeepSpeedZeroConfig.model_fields,
)
OWN_SCHEDULES = Replacement(
    # DeepSpeed's schedules have one stage per process, send hidden states only, and are 1F1B.
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
        and has(DeepSpeedEngine, "_backward_prologue", "_backward_epilogue")
    ),
)


@cache
def made(replacement: Replacement) -> bool:
    """Return whether to make a replacement. If not, the main process prints the reason once."""
    fault = _fault(replacement)
    if fault and is_main_process():
        print(f"{fault}. Without {replacement.what} {replacement.otherwise}", flush=True)
    return fault is None


def require(replacement: Replacement) -> None:
    """Raise ConfigError if a replacement was not tested with this version of DeepSpeed, whose own
    code would give wrong results."""
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
