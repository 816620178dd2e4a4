"""Flags in scripts of 2019, of OneFlow and of Megatron-DeepSpeed, and the flags that replace
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class EarlyBatchFlags(FlagPart):
    """Other ways to specify batch sizes."""

    before: ClassVar[str] = "train_iters"

    num_accumulation_steps: int | None = option(None, bounds=POSITIVE)
    """Number of micro batches per optimizer step on each data-parallel rank. The global batch size
    is micro-batch-size x data-parallel size x this number (flag of OneFlow)."""
    eval_batch_size: int | None = option(None, bounds=POSITIVE)
    """Micro batch size of evaluations (flag of 2019). It must equal --micro-batch-size."""
    eval_seq_length: int | None = option(None, bounds=POSITIVE)
    """Sequence length of evaluations (flag of 2019). It must equal --seq-length."""

    def whole_batch(self, micro: int, replicas: int, resolver: ConfigResolver) -> int:
        """Return the global batch size for micro batches of ``micro`` samples on ``replicas``
        data-parallel ranks. Raises ConfigError if another one is given."""
        steps, name = self.num_accumulation_steps, "global_batch_size"
        if steps is None:
            usual: int = super().whole_batch(micro, replicas, resolver)  # type: ignore[misc]
            return usual
        shown, given = resolver.show("num_accumulation_steps"), resolver.values[name]
        resolver.check(
            resolver.values.get("rampup_batch_size") is None,
            f"{shown} fixes the global batch size, and --rampup-batch-size increases it: give "
            "--global-batch-size with the latter",
        )
        whole = micro * replicas * steps
        resolver.check(
            given in (None, whole),
            f"{resolver.show(name)} contradicts {shown}, which makes it {whole} = "
            f"{resolver.show('micro_batch_size')} x {replicas} data-parallel processes x {steps}; "
            "give one of them",
        )
        how = "micro-batch-size x data-parallel size x num-accumulation-steps"
        return resolver.fill(name, given, whole, how)


@dataclass(frozen=True, kw_only=True)
class EarlyLayoutFlags(FlagPart):
    """Other ways to choose a pipeline schedule and activation recomputation."""

    before: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_zbh1_pipeline": "num_layers_per_virtual_pipeline_stage",
            "enable_zbh1_exact_semantics": "num_layers_per_virtual_pipeline_stage",
            "checkpoint_activations": "distributed_backend",
            "activations_checkpoint_method": "distributed_backend",
        }
    )

    enable_zbh1_pipeline: bool = option(False, role="layout")
    """Same as --pipeline-schedule zbh1."""
    enable_zbh1_exact_semantics: bool = option(False, role="layout")
    """Sum gradients in the order of 1f1b, which --pipeline-schedule zbh1 does in any case."""
    checkpoint_activations: bool = option(False, aliases=("--deepspeed-activation-checkpointing",))
    """Old name for --recompute-granularity full --recompute-method uniform."""
    activations_checkpoint_method: str | None = option(None, choices=("uniform", "block"))
    """Old name for --recompute-granularity full --recompute-method with the same value."""

    def schedule(self, resolver: ConfigResolver) -> str | None:
        """Return the pipeline schedule that flags ask for. Raises ConfigError if they contradict
        each other."""
        schedule: str | None = super().schedule(resolver)  # type: ignore[misc]
        zbh1, exact = self.enable_zbh1_pipeline, self.enable_zbh1_exact_semantics
        resolver.check(
            zbh1 or schedule == "zbh1" or not exact,
            "--enable-zbh1-exact-semantics has an effect with --enable-zbh1-pipeline only",
        )
        if not zbh1:
            return schedule
        resolver.check(
            schedule in (None, "zbh1"),
            f"--enable-zbh1-pipeline contradicts {resolver.show('pipeline_schedule')}",
        )
        if not exact:
            resolver.notes.append(
                "--enable-zbh1-pipeline: gradients are summed in the order of 1f1b, as with "
                "--enable-zbh1-exact-semantics"
            )
        return "zbh1"

    def recomputation(self, resolver: ConfigResolver) -> tuple[str | None, str | None]:
        """Return the recomputation granularity and method that flags ask for. Raises ConfigError if
        they contradict each other."""
        older, name = self.activations_checkpoint_method, "recompute_granularity"
        if self.checkpoint_activations:
            resolver.imply(name, "full", "--checkpoint-activations")
        if older is not None:
            resolver.imply(name, "full", f"--activations-checkpoint-method {older}")
        granularity, method = super().recomputation(resolver)  # type: ignore[misc]
        if older is not None:
            resolver.check(
                method in (None, older),
                f"{resolver.show('activations_checkpoint_method')} contradicts "
                f"{resolver.show('recompute_method')}",
            )
            flag = "--activations-checkpoint-method"
            method = resolver.put("recompute_method", older, flag)
        return granularity, method


def check_evaluation_sizes(resolver: ConfigResolver) -> None:
    """Raise ConfigError if an evaluation size differs from the training size."""
    for name, like in (("eval_batch_size", "micro_batch_size"), ("eval_seq_length", "seq_length")):
        resolver.check(
            resolver.values[name] in (None, resolver.values[like]),
            f"{resolver.show(name)} differs from {resolver.show(like)}, with which a run "
            "evaluates too: leave it out, or evaluate in a run of its own with --skip-train",
        )
