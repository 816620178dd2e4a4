"""Attention kernels for GPUs: torch's, in the fastest order, and flash-attention's."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class GPUAttention(Feature):
    def attention_kernel(self, name: str, dropout: float) -> Any:
        from megatron.features.gpu_attention.kernels import attention_kernel

        return attention_kernel(name, dropout)

    def attention_line(
        self, config: Any, dtype: Any, device: Any, tensor: int, documents: bool, kind: Any
    ) -> str | None:
        from megatron.features.gpu_attention.kernels import describe_attention

        return describe_attention(config, dtype, device, tensor, documents, kind)


FEATURE = GPUAttention()
