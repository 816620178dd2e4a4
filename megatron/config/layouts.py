"""Parallel layouts: the supported combinations, and why others are refused.

A layout is refused by the first of :data:`RULES` that applies to it. A layout that no rule refuses
is supported, and trains to the same result as a single process. Divisibility of sizes is checked
where the sizes are derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.config.flags import ConfigError

SCHEDULES = ("1f1b", "interleaved", "dualpipev", "zbh1", "dualpipev_zb")
BOTH_WAYS = ("dualpipev", "dualpipev_zb")
"""Schedules in which micro batches pass down the pipeline's processes and back up."""
WEIGHTS_LATER = ("zbh1", "dualpipev_zb")
"""Schedules that compute weight gradients when a process would otherwise be idle."""
PRECISIONS = ("fp32", "bf16", "fp16")
RECOMPUTE = ("selective", "uniform", "block")
COMMUNICATIONS = ("p2p", "a2a", "allgather", "a2a+p2p")
TWO_LEVELS = "a2a+p2p"


class StateDtypes(NamedTuple):
    """Dtypes in which ``--use-precision-aware-optimizer`` stores main weights and Adam's moments.
    The fields are named after the flags."""

    main_params: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"

    @property
    def shown(self) -> str:
        """Flags with their values, for messages."""
        flags = (f"--{name.replace('_', '-')}-dtype" for name in self._fields)
        return " ".join(f"{flag} {dtype}" for flag, dtype in zip(flags, self, strict=True))


@dataclass(frozen=True)
class Layout:
    """Settings that decide whether a run's combination of parallelism and precision is supported.

    ``states`` is None if main weights and moments are separate float32 tensors. ``chunks`` is the
    number of pipeline stages per process. ``recompute`` is None if nothing is recomputed, or only
    the activations of MLPs (``mlp_act``). ``micro_batches`` lists each number of micro batches per
    step, several if the batch size is ramped up. It is empty if the number is unknown or nothing is
    trained. ``float8`` tells whether the blocks compute matrix products in 8 bits. ``expert`` is
    the number of ranks that a layer's experts are divided among: data-parallel ranks, and also
    tensor-parallel ranks if ``expert_tensor`` is 1, where experts are whole (None: sharded over
    ``tensor`` like other layers). ``context`` is the number of ranks that each sequence is split
    over, ``comm`` their communication, one type for all blocks or one per block (empty: p2p). With
    a2a+p2p, ``exchanging`` is the number of neighbouring ranks that exchange heads.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    data: int = 1
    zero: int = 0
    precision: str = "fp32"
    grads_in_fp32: bool = False
    states: StateDtypes | None = None
    recompute: str | None = None
    mlp_act: bool = False
    offload_optimizer: str | None = None
    offload_param: str | None = None
    micro_batches: tuple[int, ...] = ()
    float8: bool = False
    expert: int = 1
    expert_tensor: int | None = None
    context: int = 1
    comm: tuple[str, ...] = ()
    exchanging: int = 1

    @property
    def expert_axis(self) -> int:
        """Number of data-parallel ranks that experts are divided among."""
        folded = self.expert > 1 and self.expert_tensor not in (None, self.tensor)
        return self.expert // self.tensor if folded else self.expert

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense weights, over which ZeRO partitions."""
        return self.data * self.context

    @property
    def running_zero(self) -> int:
        """ZeRO stage that the engine runs, over the data-parallel and context-parallel ranks. On a
        single rank nothing can be partitioned: stage 1 computes the same as 2 and 3 without their
        copies, hooks and synchronisation. Exceptions are offloading, and stage 2 with float32
        gradient sums, which stage 1 would keep in addition to the 16-bit gradients."""
        offloaded = self.offload_optimizer or self.offload_param
        sums_only = self.zero == 2 and self.grads_in_fp32
        if self.data * self.context > 1 or self.zero < 2 or offloaded or sums_only:
            return self.zero
        return 1

    @property
    def autocast(self) -> bool:
        """True if weights are float32 and only matrix products are computed in bfloat16."""
        return self.precision == "bf16" and self.zero == 0

    @property
    def fewest_micro_batches(self) -> int:
        """Smallest number of micro batches per step that the schedule supports."""
        factor = 2 if self.schedule in BOTH_WAYS else self.schedule == "interleaved"
        return factor * self.pipeline or 1

    @property
    def dropout(self) -> str:
        """Dropout masks that equal those of a single-process run: ``all``, ``hidden`` or ``none``.

        Masks belong to samples, so data parallelism, ZeRO and pipelines do not change them. With
        tensor parallelism each process draws masks for its attention heads, and with context
        parallelism for its slice of attention. With sequence parallelism it draws all masks for its
        slice of the sequence.
        """
        if self.sequence:
            return "none"
        return "hidden" if self.tensor * self.context > 1 else "all"

    def show(self, name: str) -> str:
        """Return a value as users write it; for ``micro_batches``, only the first number."""
        value = getattr(self, name)
        if name in VALUE_FLAGS:
            return f"{VALUE_FLAGS[name]} {value}"
        if name == "micro_batches":
            batches = "batch" if value[0] == 1 else "batches"
            return (
                f"{value[0]} micro {batches} per step (global batch / (micro batch x "
                "data-parallel size))"
            )
        if name.startswith("offload"):
            return f"{name}.device {value} in the DeepSpeed JSON"
        if name == "precision":
            return "float32" if value == "fp32" else f"--{value}"
        flags = {"sequence": "--sequence-parallel", "grads_in_fp32": GRADS_IN_FP32}
        return {**flags, "states": STATES}[name]


GRADS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
STATES = "--use-precision-aware-optimizer"
VALUE_FLAGS = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "schedule": "--pipeline-schedule",
    "chunks": "--num-virtual-stages-per-pipeline-rank",
    "zero": "--zero-stage",
    "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
    "context": "--context-parallel-size",
}


def complete_schedule(schedule: str | None, chunks: int | None) -> tuple[str, int]:
    """Return a pipeline's schedule and stages per process, with defaults in place of None."""
    if chunks is None:
        chunks = 2 if schedule in ("interleaved", *BOTH_WAYS) else 1
    return schedule or ("interleaved" if chunks > 1 else "1f1b"), chunks


@dataclass(frozen=True)
class Rule:
    """Reason for refusing some layouts. ``values`` are the names of the fields that contradict each
    other. ``reason``, ``better`` (what to do instead) and ``ramp`` (what to observe if the batch
    size is ramped up) are clauses of the error message."""

    name: str
    values: tuple[str, ...]
    refuses: Callable[[Layout], bool]
    reason: str
    better: str
    ramp: str = ""

    def message(self, layout: Layout) -> str:
        """Return the error message for a layout that the rule refuses."""
        shown = replace(layout, micro_batches=self._first_refused(layout))
        given = [name for name in self.values if getattr(layout, name) is not None]
        values = ", ".join(shown.show(name) for name in given)
        return f"{values}: {self.explanation(len(layout.micro_batches) > 1)}"

    def explanation(self, ramp: bool) -> str:
        """Return the reason and the remedy. ``ramp`` tells whether the batch size is ramped up."""
        return "; ".join(filter(None, (self.reason, self.better, self.ramp if ramp else "")))

    def _first_refused(self, layout: Layout) -> tuple[int, ...]:
        """Return the first refused number of micro batches of a ramp-up, or an empty tuple."""
        each = ((count,) for count in layout.micro_batches)
        return next((m for m in each if self.refuses(replace(layout, micro_batches=m))), ())


RULES = (
    Rule(
        "sequence without tensor parallelism",
        ("sequence", "tensor"),
        lambda a: a.sequence and a.tensor == 1,
        "activations are split along the sequence over the processes that share each layer's "
        "matrices, and there is only one",
        "set --tensor-model-parallel-size to 2 or more, or leave --sequence-parallel out",
    ),
    Rule(
        "schedule without a pipeline",
        ("schedule", "chunks", "pipeline"),
        lambda a: a.pipeline == 1 and (a.schedule != "1f1b" or a.chunks > 1),
        "a pipeline needs two or more processes",
        "set --pipeline-model-parallel-size to 2 or more, or leave the schedule and the stages "
        "per process out",
    ),
    Rule(
        "1f1b or zbh1 with several stages per process",
        ("schedule", "chunks"),
        lambda a: a.schedule in ("1f1b", "zbh1") and a.chunks > 1,
        "this schedule has one stage per process",
        "use --pipeline-schedule interleaved, or one stage per process",
    ),
    Rule(
        "interleaved with one stage per process",
        ("schedule", "chunks"),
        lambda a: a.schedule == "interleaved" and a.chunks < 2,
        "there is nothing to interleave",
        "set 2 or more stages per process, or use --pipeline-schedule 1f1b",
    ),
    Rule(
        "dualpipev with other than two stages per process",
        ("schedule", "chunks"),
        lambda a: a.schedule in BOTH_WAYS and a.chunks != 2,
        "micro batches go down the processes and back up, so each process has exactly 2 stages",
        "set --num-virtual-stages-per-pipeline-rank to 2 or leave it out",
    ),
    Rule(
        "interleaved with an uneven number of micro batches",
        ("schedule", "pipeline", "micro_batches"),
        lambda a: a.schedule == "interleaved" and any(m % a.pipeline for m in a.micro_batches),
        "the stages of a process take turns on groups of as many micro batches as the pipeline has "
        "processes",
        "choose --global-batch-size so that every step has a multiple of that many",
        "the same goes for each size of --rampup-batch-size",
    ),
    Rule(
        "dualpipev with few micro batches",
        ("schedule", "pipeline", "micro_batches"),
        lambda a: a.schedule in BOTH_WAYS and any(m < 2 * a.pipeline for m in a.micro_batches),
        "the schedule fills the pipeline from both ends and needs at least twice as many micro "
        "batches as the pipeline has processes",
        "choose a larger --global-batch-size",
        "with --rampup-batch-size the first size must be large enough already",
    ),
    Rule(
        "pipelines with ZeRO 3",
        ("zero", "pipeline"),
        lambda a: a.pipeline > 1 and a.zero == 3,
        "parameters would be gathered for every micro batch and not once in a step, which costs "
        "more time than the memory is worth",
        "use --zero-stage 0, 1 or 2",
    ),
    Rule(
        "precision-aware optimizer in other dtypes or stages",
        ("states", "precision", "zero"),
        lambda a: a.states is not None and (a.precision != "bf16" or a.zero not in (1, 2)),
        "its main weights are the bf16 weights and what they lack, and the update that stores them "
        "is that of ZeRO 1 and 2",
        "use --bf16 with --zero-stage 1 or 2, or leave it out",
    ),
    Rule(
        "offload_optimizer without ZeRO",
        ("offload_optimizer", "zero"),
        lambda a: a.offload_optimizer is not None and a.zero == 0,
        "only ZeRO separates optimizer state from the parameters",
        "use --zero-stage 1, 2 or 3, or remove the key",
    ),
    Rule(
        "pipelines with ZeRO 2 and offload",
        ("zero", "pipeline", "offload_optimizer"),
        lambda a: a.pipeline > 1 and a.zero == 2 and a.offload_optimizer is not None,
        "DeepSpeed reduces the gradients where it offloads, and its pipeline engine keeps them "
        "whole",
        "use --zero-stage 1, or remove the key",
    ),
    Rule(
        "offload_param below ZeRO 3",
        ("offload_param", "zero"),
        lambda a: a.offload_param is not None and a.zero < 3,
        "parameters can be offloaded only when they are partitioned",
        "use --zero-stage 3, without a pipeline, or remove the key",
    ),
    Rule(
        "precision-aware optimizer with offload",
        ("states", "offload_optimizer"),
        lambda a: a.states is not None and a.offload_optimizer is not None,
        "DeepSpeed offloads float32 main weights and moments",
        "remove the key, or leave the flag out",
    ),
)
"""Rules that refuse unsupported layouts. More fundamental problems come first."""


def refusal(layout: Layout) -> Rule | None:
    """Return the first rule that refuses a layout, or None if the layout is supported."""
    return next((rule for rule in RULES if rule.refuses(layout)), None)


def check_layout(layout: Layout) -> None:
    """Raise ConfigError with the reason if the layout is not supported."""
    rule = refusal(layout)
    if rule is not None:
        raise ConfigError(rule.message(layout))
