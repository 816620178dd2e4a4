"""Feature for attention kernels on GPUs: torch's own, with the fastest preferred, and those of the
flash-attention packages."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class GPUAttention(Feature):
    def attention_kernel(self, name: str, dropout: float) -> Any:
        from megatron.features.gpu_attention.kernels import attention_kernel

        return attention_kernel(name, dropout)

    def attention_line(self, config: Any, device: Any, kind: Any) -> str | None:
        from megatron.features.gpu_attention.kernels import attention_line

        return attention_line(config, device, kind)


FEATURE = GPUAttention()
