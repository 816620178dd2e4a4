"""Flags that save memory for long sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    ConfigResolver,
    nearest,
    needs_value,
    option,
)

if TYPE_CHECKING:
    from megatron.config import ParallelConfig
    from megatron.config.run import RunConfig

_FULL = needs_value("recompute_granularity", "full", refused=False)
_FPDT = needs_value("ds_sequence_parallel_fpdt", refused=False)
_SECTION = "activation_checkpointing"
_KEYS = (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
    "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
)  # fmt: skip
_WITHOUT_EFFECT = {
    "contiguous_memory_optimization": "the memory of a kept input is used again for the next one",
    "synchronize_checkpoint_boundary": "the CPU never synchronizes after a layer",
    "profile": "tools/profile_step.py says where the time of a step goes",
}
"""Switches of DeepSpeed's section that have no effect in this project, with the reasons."""


@dataclass(frozen=True)
class LongContextConfig(FlagSection):
    """Memory for long sequences: MLPs in chunks, activations and keys in host memory."""

    after: ClassVar[str] = "parallel"

    mlp_chunks_for_training: int = option(1, bounds=NOT_NEGATIVE)
    """Number of chunks of the sequence in which dense MLPs are computed, so that the inner
    activations of only one chunk exist at a time. The backward pass recomputes them. 0 selects
    tokens / hidden size, rounded up."""
    cpu_offloading_num_layers: int = option(0, bounds=NOT_NEGATIVE)
    """Number of blocks of each pipeline stage, starting with its first, whose saved activations are
    offloaded to host memory between the forward and backward pass."""
    cpu_offloading: bool = option(False)
    """Offload all blocks, as --cpu-offloading-num-layers does for some."""
    checkpoint_in_cpu: bool = option(False, needs=_FULL)
    """Keep the inputs of recomputed layers in host memory (cpu_checkpointing of
    activation_checkpointing in the DeepSpeed JSON)."""
    partition_activations: bool = option(
        False,
        aliases=("--distribute-saved-activations", "--distribute-checkpointed-activations"),
        needs=_FULL,
    )
    """Partition the inputs of recomputed layers across tensor-parallel ranks, and gather them for
    the backward pass (partition_activations of activation_checkpointing in the DeepSpeed JSON).
    --sequence-parallel divides more activations and makes this unnecessary."""
    activation_checkpointing: str | None = option(None, internal=True)
    """Section activation_checkpointing of a DeepSpeed JSON."""
    ds_sequence_parallel_fpdt: bool = option(False)
    """FPDT: compute attention, MLP and loss in chunks of the sequence."""
    ds_sequence_parallel_fpdt_chunk_size: int = option(65536, bounds=POSITIVE, needs=_FPDT)
    """Number of tokens of the whole sequence that attention computes at a time. Each rank computes
    MLPs for half as many, and the loss for a 32nd, divided by the context-parallel size."""
    ds_sequence_parallel_fpdt_offloading: bool = option(False, needs=_FPDT)
    """Keep the queries, keys, values and outputs of FPDT's chunks in host memory."""

    @property
    def in_host_memory(self) -> bool:
        """True if the inputs of recomputed layers are kept in host memory."""
        return self.checkpoint_in_cpu or bool(self.section.get("cpu_checkpointing"))

    def divides_inputs(self, parallel: ParallelConfig) -> bool:
        """Return whether the inputs of recomputed layers are partitioned across tensor-parallel
        ranks."""
        asked = self.partition_activations or self.section.get("partition_activations")
        return bool(asked) and self._why_whole(parallel) is None

    @staticmethod
    def _why_whole(parallel: ParallelConfig) -> str | None:
        """Return why the inputs of recomputed layers cannot be partitioned, or None if they can."""
        if parallel.recompute_granularity != "full":
            return "it is for the inputs of --recompute-granularity full"
        if parallel.sequence_parallel:
            return "--sequence-parallel divides all activations between blocks already"
        if parallel.tensor_model_parallel_size == 1:
            return "there is one tensor-parallel rank"
        return None

    @property
    def tiles(self) -> bool:
        """True if MLPs may be computed in tiles."""
        return self.mlp_chunks_for_training != 1 or self.ds_sequence_parallel_fpdt

    def loss_tokens(self, ranks: int) -> int:
        """Return the number of tokens of a rank whose logits FPDT computes at a time."""
        return max(1, self.ds_sequence_parallel_fpdt_chunk_size // ranks // 32)

    @property
    def section(self) -> dict[str, Any]:
        """Content of DeepSpeed's section of the JSON; empty if the section is disabled."""
        content = json.loads(self.activation_checkpointing or "{}")
        return {} if content.get("enabled") is False else content

    def check_section(self) -> None:
        """Raise ConfigError if DeepSpeed's section has unknown keys or invalid values."""
        content = json.loads(self.activation_checkpointing or "{}")
        if not isinstance(content, dict):
            raise ConfigError(f"{_SECTION} is {json.dumps(content)}; it must be an object")
        for key, value in content.items():
            if key not in (*_KEYS, "enabled"):
                hint = nearest(key, _KEYS, '; the nearest known one is "{}"')
                raise ConfigError(f'unknown key "{key}" in {_SECTION}{hint}')
            count = key == "number_checkpoints"
            fits = value is None or (type(value) is int if count else isinstance(value, bool))
            if not fits:
                kind = "a number of checkpoints or null" if count else "true or false"
                raise ConfigError(f"{_SECTION}.{key} is {json.dumps(value)}; it must be {kind}")

    def blocks_offloaded(self, blocks: int) -> int:
        """Return how many of a stage's ``blocks`` keep their activations in host memory."""
        return blocks if self.cpu_offloading else min(blocks, self.cpu_offloading_num_layers)

    def tile(self, length: int, tokens: int, hidden_size: int, ranks: int) -> int:
        """Return the number of tokens of an MLP tile.

        Args:
            length: length of a rank's slice of a sequence between blocks.
            tokens: number of tokens that the MLP processes together, after they are gathered by
                sequence parallelism.
            ranks: context-parallel size.
        """
        chunks = self.mlp_chunks_for_training or -(-tokens // hidden_size)
        if self.ds_sequence_parallel_fpdt:
            most = max(1, self.ds_sequence_parallel_fpdt_chunk_size // ranks // 2)
            chunks = max(chunks, -(-tokens // most))
        return max(1, -(-length // chunks))

    def check(self, config: RunConfig, resolver: ConfigResolver) -> None:
        """Check the flags against each other and the run. Raises ConfigError if they contradict."""
        for key, reason in _WITHOUT_EFFECT.items():
            if self.section.get(key):
                resolver.notes.append(f"{_SECTION}.{key} changes nothing: {reason}")
        recompute = config.parallel.recompute_granularity
        if self.section.get("cpu_checkpointing") and recompute != "full":
            resolver.notes.append(
                f"{_SECTION}.cpu_checkpointing changes nothing without --recompute-granularity full"
            )
        divided, why = "partition_activations", self._why_whole(config.parallel)
        if self.section.get(divided) and why:
            resolver.notes.append(f"{_SECTION}.{divided} changes nothing: {why}")
        elif self.partition_activations and why and recompute == "full":
            resolver.notes.append(f"{resolver.show(divided)} changes nothing: {why}")
        self._check_offloading(config, resolver)
        if self.ds_sequence_parallel_fpdt:
            self._check_chunks(config, resolver)
        name = "mlp_chunks_for_training"
        shown = "ds_sequence_parallel_fpdt" if self.mlp_chunks_for_training == 1 else name
        resolver.check(
            not (self.tiles and config.fast_paths.in_8_bits),
            f"{resolver.show(shown)} contradicts {resolver.show('fp8_format')}, whose scales are "
            "those of whole tensors: leave one of them out",
        )

    def _check_offloading(self, config: RunConfig, resolver: ConfigResolver) -> None:
        from megatron.config.engine import GRAPH_MODES

        offloading = "cpu_offloading" if self.cpu_offloading else "cpu_offloading_num_layers"
        layers, parallel = config.model.num_layers, config.parallel
        resolver.check(
            self.cpu_offloading_num_layers <= layers,
            f"{resolver.show('cpu_offloading_num_layers')} exceeds "
            f"{resolver.show('num_layers')}: give at most that, or --cpu-offloading for all",
        )
        blocks = bool(self.blocks_offloaded(layers))
        resolver.check(
            not (blocks and parallel.recompute_method == "uniform"),
            f"{resolver.show(offloading)} contradicts --recompute-granularity full, of which only "
            "the inputs of layers are kept: give --checkpoint-in-cpu, or leave recomputation out",
        )
        mode = config.fast_paths.torch_compile_mode
        resolver.check(
            not (blocks and mode in GRAPH_MODES),
            f"{resolver.show(offloading)} contradicts {resolver.show('torch_compile_mode')}: CUDA "
            "graphs keep the memory of their activations; use --torch-compile-mode default",
        )

    def _check_chunks(self, config: RunConfig, resolver: ConfigResolver) -> None:
        length, ranks = config.model.seq_length, config.parallel.context_parallel_size
        name = "ds_sequence_parallel_fpdt_chunk_size"
        chunk, shown = self.ds_sequence_parallel_fpdt_chunk_size, resolver.show(name)
        resolver.check(
            length % min(chunk, length) == 0,
            f"{shown} must divide {resolver.show('seq_length')}: choose a divisor of {length}",
        )
        resolver.check(
            chunk % (2 * ranks) == 0,
            f"{shown} must be divisible by 2 x {resolver.show('context_parallel_size')}: choose a "
            f"multiple of {2 * ranks}",
        )
        kinds = set(config.parallel.cp_comm_type or ("p2p",)) - {"a2a"}
        resolver.check(
            ranks == 1 or not kinds,
            f"--ds-sequence-parallel-fpdt contradicts --cp-comm-type {' '.join(sorted(kinds))}: it "
            "computes whole sequences of some heads in chunks, and the keys of other ranks come in "
            "blocks already; give --cp-comm-type a2a, or leave it out and give "
            "--mlp-chunks-for-training 0 and --cpu-offloading",
        )
