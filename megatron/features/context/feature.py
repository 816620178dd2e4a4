"""Feature for long context: context parallelism, and memory savings for long sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.context.axis import ContextFlags
from megatron.features.context.flags import LongContextConfig


class ContextFeature(Feature):
    sections = {"long_context": LongContextConfig}
    flag_parts = {"parallel": ContextFlags}
    json_sections = ("activation_checkpointing",)

    def check_json(self, sections: Mapping[str, str]) -> None:
        for text in sections.values():
            LongContextConfig(activation_checkpointing=text).check_section()

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(LongContextConfig).check(config, resolver)

    def attention(self, attend: Any, config: Any, layer: int, tp: Any, kind: str) -> Any:
        context = tp.context
        if context.size == 1:
            return attend
        from megatron.features.context.attention import context_attention

        if config.decoder_num_layers is not None and kind != "full":
            layer += config.num_layers  # decoder blocks are numbered after the encoder's
        heads = config.attention.num_attention_heads // tp.group.size
        return context_attention(attend, context, context.kind(layer), heads)

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        flags, ranks = config.section(LongContextConfig), config.parallel.context_parallel_size
        if flags.tiles:
            from megatron.features.context.tiles import tile_mlps

            width = config.model.hidden_size
            tile_mlps(blocks, lambda length, whole: flags.tile(length, whole, width, ranks))
        if flags.ds_sequence_parallel_fpdt:
            from megatron.features.context.host import chunk_attention

            chunk = flags.ds_sequence_parallel_fpdt_chunk_size
            chunk_attention(blocks, chunk, flags.ds_sequence_parallel_fpdt_offloading)

    def built(self, engine: Any) -> None:
        flags, parallel = engine.config.section(LongContextConfig), engine.config.parallel
        most = flags.blocks_offloaded(engine.config.model.num_layers)
        divides = flags.divides_inputs(parallel)
        if most or flags.in_host_memory or divides:
            from megatron.features.context.offload import offload
            from megatron.features.context.partition import DividedInputs

            divided = DividedInputs(engine.mesh.tensor) if divides else None
            offload(engine.sequences, engine.device, most, flags.in_host_memory, divided)
        if flags.ds_sequence_parallel_fpdt and parallel.logits_chunk_mib is None:
            from megatron.features.context.tiles import chunk_losses

            chunk_losses(engine.model, flags.loss_tokens(parallel.context_parallel_size))


FEATURE = ContextFeature()
