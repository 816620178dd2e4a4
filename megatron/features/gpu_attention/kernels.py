"""Choice of attention kernels on a GPU, and the log line that reports it.

torch uses the first kernel in an ordered list that supports the inputs. Flash-attention 3 and 4
replace torch's own flash kernel, which is version 2, in this list.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend

from megatron.config import ConfigError, ModelConfig, RunConfig
from megatron.config.blocks import Chunk
from megatron.model.attention_backends import (
    TORCHS_ORDER,
    WITHOUT_CUDNN,
    AttentionBackend,
    KernelOrder,
    sdpa,
)
from megatron.model.attention_flex import flex_windows, why_not_flex
from megatron.model.attention_masks import AttentionKind, AttentionMasks, AttentionScoring

FAST_CUDNN = 90900
"""First cuDNN version whose attention is faster than flash-attention 2 on Hopper and Blackwell."""
EXACT_CUDNN = 91501
"""First cuDNN version whose attention is correct for lengths that are not multiples of its blocks
(pytorch issue 169849)."""
CUDNN_FIRST = (SDPBackend.CUDNN_ATTENTION, *WITHOUT_CUDNN)
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *WITHOUT_CUDNN[1:])


class _Flash(NamedTuple):
    """A version of flash-attention.

    Attributes:
        module: module that can be imported if the version is installed.
        package: name of the package to install.
        capabilities: major compute capabilities of the supported GPUs; empty for all GPUs.
        implementation: name in torch's registry; None for a package that is called directly.
    """

    module: str
    package: str
    capabilities: tuple[int, ...] = ()
    implementation: str | None = None

    @property
    def installed(self) -> bool:
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):  # a parent package is missing or broken
            return False
        # A folder without code belongs to another version of flash-attention.
        return spec is not None and (spec.origin is not None or not spec.submodule_search_locations)


FLASH = {
    2: _Flash("flash_attn", "flash-attn"),
    3: _Flash("flash_attn_interface", "flash-attn-3", (9,), "FA3"),
    4: _Flash("flash_attn.cute", "flash-attn-4", (9, 10), "FA4"),
}


def version_of_flash(name: str, dropout: float) -> int:
    """Return the version that ``--attention-backend`` selects. ``flash`` selects the fastest one
    that is installed and supports the GPU and the dropout. Raises ConfigError if none can be
    used."""
    if name != "flash":
        version = int(name.removeprefix("flash"))
        problem = _problem(version, dropout)
        if problem is not None:
            raise ConfigError(f"--attention-backend {name} {problem}")
        return version
    # Version 3 was written for Hopper (9.x), and version 4 for Blackwell (10.x).
    for version in (4, 3, 2) if _capability()[0] > 9 else (3, 4, 2):
        if _problem(version, dropout) is None:
            return version
    raise ConfigError(
        "--attention-backend flash needs the flash-attn package (pip install flash-attn), or, for "
        "Hopper and Blackwell and without --attention-dropout, version 3 or 4 of it (flash-attn-3, "
        "flash-attn-4); sdpa uses torch's own flash kernel"
    )


def _problem(version: int, dropout: float) -> str | None:
    """Return why a version cannot be used, with a remedy, or None if it can be used."""
    flash = FLASH[version]
    if not flash.installed:
        return (
            f"needs the {flash.package} package, which has the module {flash.module}; sdpa uses "
            "torch's own kernels"
        )
    if flash.implementation is None:
        return None
    if _capability()[0] not in flash.capabilities:
        needed = " or ".join(f"{major}.0" for major in flash.capabilities)
        return f"needs a GPU of compute capability {needed}; flash takes what is possible here"
    if dropout:
        return (
            f"has no dropout: set --attention-dropout 0 (it is {dropout}), or take flash2 or sdpa"
        )
    if flash.implementation not in attention.list_flash_attention_impls():
        return f"is not known to torch {torch.__version__}; a newer torch has it"
    return None


def kernel_order(name: str) -> KernelOrder:
    """Return the kernel order for an ``--attention-backend``. cudnn, flash3 and flash4 put their
    own kernel first. sdpa keeps torch's order, but puts cuDNN first where it is fastest. A call has
    a process-wide effect: flash3 and flash4 replace torch's flash kernel until the next call
    restores or replaces it. Raises ConfigError for cudnn without a suitable GPU."""
    on_gpu = torch.cuda.is_available()
    usable = on_gpu and torch.backends.cudnn.is_available()
    if name == "cudnn" and not usable:
        raise ConfigError(
            "--attention-backend cudnn needs an NVIDIA GPU and a torch that is built with cuDNN; "
            "sdpa uses the kernels that are available"
        )
    if not on_gpu:
        return TORCHS_ORDER
    _let_torch_set_its_order()
    _activate(FLASH[int(name[-1])].implementation if name.startswith("flash") else None)
    version = (torch.backends.cudnn.version() or 0) if usable else 0
    kernels: tuple[SDPBackend, ...] = ()
    if name in ("flash3", "flash4"):
        kernels = FLASH_FIRST
    elif name == "cudnn" or _cudnn_is_fastest(version):
        kernels = CUDNN_FIRST
    return KernelOrder(kernels, version >= EXACT_CUDNN)


def _cudnn_is_fastest(version: int) -> bool:
    """Return whether cuDNN is the fastest kernel but torch would try it last. From version
    EXACT_CUDNN on, torch itself tries it first."""
    # torch's own environment variable that disables this preference
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    major, minor = _capability()
    return FAST_CUDNN <= version < EXACT_CUDNN and major in (9, 10) and minor in (0, 3)


def _activate(implementation: str | None) -> None:
    if implementation == attention.current_flash_attention_impl():
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


@functools.cache
def _let_torch_set_its_order() -> None:
    """Make torch set its kernel order now. It does so when it first chooses a kernel, and would
    overwrite ours."""
    x = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda")
    torch._fused_sdp_choice(x, x, x)


def _capability() -> tuple[int, int]:
    """Return the GPU's compute capability, or (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def flash(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    scores: AttentionScoring,
    masks: AttentionMasks,
    dropout: float,
    bias: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend with version 2 of the flash-attn package. Falls back to :func:`sdpa` for documents,
    padding, chunks, ALiBi, other biases, softcapped scores and sinks."""
    unseen = masks.document_ids if scores.causal == masks.causal else None
    if not scores.causal and unseen is None:
        unseen = masks.tokens
    plain = bias is None and unseen is None and not scores.slopes and scores.softcap is None
    plain = plain and not isinstance(scores.window, Chunk)
    if sinks_N is not None or not plain:
        return sdpa(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout, bias, sinks_N)
    from flash_attn import flash_attn_func

    # flash-attn's window is the number of keys before and after a query's own position.
    left = right = -1
    if isinstance(scores.window, int):
        left, right = (scores.window - 1, 0) if scores.causal else (scores.window // 2,) * 2
    q, k, v = (x.transpose(1, 2) for x in (q_BNSD, k_BKTD, v_BKTD))
    y = flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout,
        softmax_scale=scores.scale,
        causal=scores.causal,
        window_size=(left, right),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return y.transpose(1, 2)


cudnn = partial(sdpa, order=KernelOrder(CUDNN_FIRST))
"""Variant of :func:`sdpa` that prefers cuDNN's kernel to torch's others."""


def attention_kernel(name: str, dropout: float) -> AttentionBackend:
    """Return the kernel that an ``--attention-backend`` selects at this dropout probability. Raises
    ConfigError if the kernel's package or a suitable GPU is missing."""
    if name.startswith("flash"):
        version = version_of_flash(name, dropout)
        if version == 2:
            return flash
        name = f"flash{version}"
    order = kernel_order(name)
    return sdpa if order == TORCHS_ORDER else _with_order(order)


@functools.cache
def _with_order(order: KernelOrder) -> AttentionBackend:
    """Return a backend with this kernel order. Equal orders share one object, so that a block is
    compiled only once for each."""
    return partial(sdpa, order=order)


def attention_line(config: RunConfig, device: torch.device, kind: AttentionKind) -> str:
    """Return :func:`describe_attention` for a run whose blocks have attention of this ``kind``."""
    # Samples for attention that is not causal are padded.
    documents = (
        kind != "causal"
        or config.data.reset_attention_mask
        or any(each.samples == "packed" and each.reads_all for each in config.kinds)
    )
    half = torch.float16 if config.precision.fp16 else torch.bfloat16
    dtype = half if config.precision.fp16 or config.precision.bf16 else torch.float32
    tensor = config.parallel.tensor_model_parallel_size
    return describe_attention(config.model, dtype, device, tensor, documents, kind)


def describe_attention(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensor: int,
    documents: bool,
    kind: AttentionKind = "causal",
) -> str:
    """Return the log line about a run's attention kernels. It reports what torch would choose for
    the run's shapes, without computing attention. ``tensor`` is the tensor-parallel size.
    ``documents`` tells whether attention is masked by documents or padding. Raises ConfigError like
    :func:`kernel_order`."""
    chosen: Counter[str] = Counter()
    scorings = Counter(
        AttentionScoring.of(config, layer, kind=kind) for layer in range(config.num_layers)
    )
    for scores, count in scorings.items():
        chosen[_kernel(config, scores, dtype, device, tensor, documents)] += count
    kernels = list(chosen)
    if len(kernels) > 1:
        kernels = [f"{kernel} in {count} blocks" for kernel, count in chosen.items()]
    backend = config.attention.attention_backend
    return (
        f"attention: {', '.join(kernels)} (torch {torch.__version__}; "
        f"--attention-backend {backend})"
    )


def _kernel(
    config: ModelConfig,
    scores: AttentionScoring,
    dtype: torch.dtype,
    device: torch.device,
    tensor: int,
    documents: bool,
) -> str:
    shape, length = config.attention, config.seq_length
    name, dropout = shape.attention_backend, shape.attention_dropout
    if name == "eager":
        return "plain matrix products"
    if name.startswith("flash"):
        name = f"flash{version_of_flash(name, dropout)}"
    learned = config.positions.position_embedding_type == "relative"
    sinks = shape.softmax_type != "vanilla"
    plain = not (documents or learned or scores.slopes or scores.softcap or sinks)
    if name == "flash2" and plain:
        return "flash-attention 2 of the package flash-attn"
    masked = learned or scores.window in flex_windows(config, length, documents, scores.causal)
    why = "relative positions are learned" if learned else why_not_flex(config, device.type)
    if (masked or sinks) and why is None:
        return "FlexAttention"
    if scores.softcap is not None or (sinks and (learned or dropout or device.type != "cpu")):
        return f"plain matrix products ({why})"
    heads = shape.num_attention_heads // tensor
    # With a mask, keys and values are repeated for all query heads that share them.
    groups = heads if masked else max(shape.num_query_groups // tensor, 1)
    q, k, v = (
        torch.empty(1, length, count, shape.kv_channels, dtype=dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, groups, groups)
    )
    mask = None
    if masked:
        mask = torch.empty(1, 1, 1, length, dtype=dtype, device=device)
        mask = mask.expand(1, 1, length, length).requires_grad_(learned)
    order = TORCHS_ORDER if name == "flash2" else kernel_order(name)
    with order.during(device, length, length, masked, learned):
        choice = torch._fused_sdp_choice(
            q, k, v, mask, dropout, not masked, scale=scores.scale, enable_gqa=heads != groups
        )
        kernel = SDPBackend(choice)
    said = _name(kernel)
    if kernel == SDPBackend.MATH:
        said += (
            f": no fused kernel supports {str(dtype).removeprefix('torch.')} with {heads} query "
            f"heads on {groups} key heads of {shape.kv_channels} channels here"
        )
    return f"{said}, with a dense mask since {why}" if masked else said


def _name(kernel: SDPBackend) -> str:
    if kernel == SDPBackend.CUDNN_ATTENTION:
        version = torch.backends.cudnn.version() or 0
        return f"cuDNN {version // 10000}.{version // 100 % 100}"
    if kernel == SDPBackend.FLASH_ATTENTION:
        other = attention.current_flash_attention_impl()
        return "flash-attention 2" if other is None else f"flash-attention {other[-1]}"
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        return "memory-efficient attention"
    return "torch's slow math kernel, which writes out all scores"
