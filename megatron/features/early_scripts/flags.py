"""Flags that scripts of 2019 and of OneFlow have for the sizes of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class EarlyBatchFlags(FlagPart):
    """Other ways to give the sizes of batches."""

    before: ClassVar[str] = "train_iters"

    num_accumulation_steps: int | None = option(None, bounds=POSITIVE)
    """Micro batches per optimizer step and data-parallel rank: the global batch size is
    micro-batch-size x data-parallel size x this number (OneFlow)."""
    eval_batch_size: int | None = option(None, bounds=POSITIVE)
    """Micro batch size of evaluations; it must be --micro-batch-size (2019)."""
    eval_seq_length: int | None = option(None, bounds=POSITIVE)
    """Sequence length of evaluations; it must be --seq-length (2019)."""

    def whole_batch(self, micro: int, replicas: int, resolver: ConfigResolver) -> int:
        """The global batch size of micro batches of a size on ``replicas`` data-parallel ranks.
        Raises ConfigError if another is given."""
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


def check_evaluation_sizes(resolver: ConfigResolver) -> None:
    """Refuse evaluation batches that differ from the training batches."""
    for name, like in (("eval_batch_size", "micro_batch_size"), ("eval_seq_length", "seq_length")):
        resolver.check(
            resolver.values[name] in (None, resolver.values[like]),
            f"{resolver.show(name)} differs from {resolver.show(like)}, with which a run "
            "evaluates too: leave it out, or evaluate in a run of its own with --skip-train",
        )
