"""Checks of the keys for offloading and ZeRO++ in the DeepSpeed JSON.

DeepSpeed compiles its own Adam for CPUs, and needs it for an optimizer that is partly on the device
(Twin-Flow, ``ratio``), for SuperOffload and for ZenFlow. It reads and writes files (``nvme``) with
libaio, which it compiles too. This trainer updates with torch's AdamW and needs neither: DeepSpeed
offloads to host memory, and :mod:`megatron.features.tiers.places` moves the tensors from there.

With float32 Adam, each weight has 12 bytes of main weight and moments. In addition DeepSpeed keeps
the float32 gradients for the update, and a second buffer: the gradients that it accumulates (stage
3) or the updated weights on their way to the device (stages 1 and 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.config import ConfigError, RunConfig
from megatron.config.layouts import Layout

ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
QUANTISED = {
    "zero_quantized_weights": "weights travel in 8 bits",
    "zero_quantized_nontrainable_weights": "frozen weights are kept in 8 bits",
    "zero_quantized_gradients": "gradients travel in 4 bits between the ranks of several nodes",
}
"""Keys of ZeRO++ that quantise, with a description of what they make inexact."""

_REMOVED = {
    "super_offload": (
        "SuperOffload's updates are those of DeepSpeed's compiled Adam in a process of its own, "
        "which the rates of a step reach without its weight decay"
    ),
    "zenflow": (
        "ZenFlow updates a part of the columns in each step and the others later, by DeepSpeed's "
        "compiled Adam, so that a checkpoint would lack the gradients that wait"
    ),
}
_INSTEAD = '"offload_optimizer": {"device": "cpu"} with a "ratio" divides the step'


def section_of(zero: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the section ``key`` of ``zero_optimization``, or an empty one if it is missing."""
    section = zero.get(key)
    return section if isinstance(section, dict) else {}


def on_disk(zero: Mapping[str, Any], key: str) -> bool:
    """Return whether the section ``key`` offloads states to files."""
    return section_of(zero, key).get("device") == "nvme"


def ratio(zero: Mapping[str, Any]) -> float:
    """Return the fraction of weight sub-groups that is updated in host memory, 1 by default."""
    section = section_of(zero, OFFLOADS[0])
    share = section.get("ratio")
    return 1.0 if share is None or section.get("device") in (None, "none") else float(share)


def check_offload(content: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if the offload sections are wrong, or contradict the run's flags."""
    path = config.engine.deepspeed_config
    zero = content.get(ZERO) or {}
    device = section_of(zero, OFFLOADS[0]).get("device")
    adam = config.optimizer.optimizer == "adam"
    if config.engine.cpu_optimizer and not (device in ("cpu", "nvme") and adam):
        raise ConfigError(
            "--cpu-optimizer is Adam on the CPU, for states that are there: give --optimizer adam, "
            'and "offload_optimizer": {"device": "cpu"} of zero_optimization in '
            f"{path or 'a DeepSpeed JSON (--deepspeed_config)'}; or leave the flag out"
        )
    for key in OFFLOADS:
        folder = section_of(zero, key).get("nvme_path")
        if on_disk(zero, key) and not (isinstance(folder, str) and folder):
            raise ConfigError(
                f"{path or '--remote-device nvme'}: {ZERO}.{key}.device is nvme, and nvme_path is "
                f"{json.dumps(folder)}: give the folder, on a local disk of each node, as "
                f"{ZERO}.{key}.nvme_path in the DeepSpeed JSON"
            )
    if on_disk(zero, OFFLOADS[0]) and not adam:
        raise ConfigError(
            f"{path}: {ZERO}.{OFFLOADS[0]}.device nvme, --optimizer {config.optimizer.optimizer}: "
            "the states in files are those of Adam; use --optimizer adam, or cpu"
        )
    _check_ratio(zero, config)
    places = {"super_offload": section_of(zero, OFFLOADS[0]), "zenflow": zero}
    for key, reason in _REMOVED.items():
        if places[key].get(key):
            raise ConfigError(f"{path}: {key}: {reason}; remove the key: {_INSTEAD}")


def _check_ratio(zero: Mapping[str, Any], config: RunConfig) -> None:
    section = section_of(zero, OFFLOADS[0])
    share, optimizer = section.get("ratio"), config.optimizer.optimizer
    shown = f"{config.engine.deepspeed_config}: {ZERO}.offload_optimizer.ratio {json.dumps(share)}"
    if share is not None and (type(share) not in (int, float) or not 0 <= share <= 1):
        raise ConfigError(
            f"{shown} must be a number from 0 to 1, the share that is updated in main memory"
        )
    if ratio(zero) == 1:
        return
    for wrong, contradicts, remedy in (
        (config.engine.zero_stage != 3, f"--zero-stage {config.engine.zero_stage}",
         "the sub-groups that it divides are those of stage 3: use --zero-stage 3"),
        (on_disk(zero, OFFLOADS[0]), "device nvme", "it divides main memory: use cpu"),
        (optimizer not in ("adam", "sgd"), f"--optimizer {optimizer}",
         "its states are not those of one weight alone: use --optimizer adam or sgd"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"{shown}, {contradicts}: {remedy}, or set 1")


def check_zero_plus(content: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if keys of ZeRO++ contradict the ZeRO stage or the parallel layout."""
    zero, parallel = content.get(ZERO) or {}, config.parallel
    path, stage = config.engine.deepspeed_config, config.engine.zero_stage
    size = zero.get("zero_hpz_partition_size") or 1
    keys = [*QUANTISED, *["zero_hpz_partition_size"] * (size != 1)]
    for key in keys:
        if zero.get(key) and stage != 3:
            raise ConfigError(
                f"{path}: {ZERO}.{key} {json.dumps(zero[key])}, --zero-stage {stage}: it changes "
                "how partitioned weights are gathered; use --zero-stage 3, or remove the key"
            )
    ranks = parallel.data_parallel_size * parallel.context_parallel_size
    shown = f"{path}: {ZERO}.zero_hpz_partition_size {size}"
    if ranks % size:
        raise ConfigError(
            f"{shown} must divide the {ranks} processes that ZeRO partitions over: choose the "
            "number of processes of a node"
        )
    if size > 1 and parallel.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"{shown}, --tensor-model-parallel-size {parallel.tensor_model_parallel_size}: "
            "DeepSpeed's second copies are shared by neighbouring processes, which have different "
            "parts of each layer; remove one of the two"
        )


def notes(content: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return notes for the user about the effects of the keys."""
    zero, lines = content.get(ZERO) or {}, []
    if config.engine.cpu_optimizer:
        lines.append(
            "--cpu-optimizer: torch's fused AdamW updates the offloaded states, and nothing is "
            "compiled, as DeepSpeedCPUAdam would be"
        )
    rounded = [f"{key}: {what}" for key, what in QUANTISED.items() if zero.get(key)]
    if rounded:
        lines.append(f"not exact: {'; '.join(rounded)}")
    return lines


def check_device(settings: Mapping[str, Any], on_cpu: bool) -> None:
    """Raise ConfigError if keys need GPU kernels but the run is on a CPU."""
    zero = settings.get(ZERO) or {}
    for key in QUANTISED:
        if on_cpu and zero.get(key):
            raise ConfigError(
                f"{ZERO}.{key} of the DeepSpeed JSON runs on GPUs only: DeepSpeed's kernels that "
                "round are CUDA's; remove the key"
            )


def leave_to_us(settings: dict[str, Any]) -> None:
    """Edit DeepSpeed's settings in place so that it keeps states in host memory, from which this
    feature moves them."""
    zero = settings.get(ZERO) or {}
    for key in OFFLOADS:
        section = zero.get(key)
        if isinstance(section, dict):
            if section.get("device") == "nvme":
                section.update(device="cpu", pin_memory=False)
            section.pop("nvme_path", None)
            section.pop("ratio", None)


ADAM = 12
"""Bytes per weight of Adam's main weights and two moments."""


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes per offloaded main weight of the gradients and the second buffer."""
    size = 4 if layout.precision == "fp32" else 2
    return 4 + (4 if layout.zero == 3 and layout.grads_in_fp32 else size)


def moved_bytes(layout: Layout, elements: float) -> float:
    """Return the bytes that ``offload_optimizer`` moves for a partition of ``elements`` weights,
    including padding: to a rank's files with device ``nvme``, to host memory with ``cpu``."""
    return (ADAM + gradient_bytes(layout)) * elements


def weight_bytes(layout: Layout, elements: float) -> float:
    """Return the bytes that ``offload_param`` moves for a partition of ``elements`` weights."""
    return (4 if layout.precision == "fp32" else 2) * elements
