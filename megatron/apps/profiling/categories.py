"""Classification of operators and kernels by their names and the events around them.

Names come from torch's operators (``aten::mm``), autograd's nodes (``MmBackward0``), inductor's
fused kernels (whose names list what they fuse), and the GPU kernels of cuBLAS, cuDNN, CUTLASS,
flash-attention, NCCL and torch. Phases are marked by the engine (``megatron::forward``) or, in
traces of other programs, by torch.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

DATA, FORWARD, BACKWARD, OPTIMIZER, REST = "data", "forward", "backward", "optimizer", "rest"
# Phases of a step, in order. ``rest`` is everything outside the other phases.
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, REST)

# Scopes between two steps. They belong to neither step.
OUTSIDE = ("megatron::evaluate", "megatron::save")

_PHASES = (
    (DATA, re.compile(r"megatron::data$|enumerate\(DataLoader\)")),
    (FORWARD, re.compile(r"megatron::forward$")),
    (BACKWARD, re.compile(r"megatron::backward$|autograd::engine::evaluate_function")),
    (OPTIMIZER, re.compile(r"megatron::optimizer$|Optimizer\.step#")),
)

ATTENTION, GEMMS, NORMS = "attention", "matrix products", "norms"
ELEMENTWISE, EMBEDDING, LOSS = "elementwise", "embedding", "loss"
UPDATE, COMMUNICATION, LOADING = "optimizer", "communication", "data"
COPIES, HOST, IDLE = "copies and casts", "host", "idle"
CATEGORIES = (ATTENTION, GEMMS, NORMS, ELEMENTWISE, EMBEDDING, LOSS, UPDATE, COMMUNICATION, LOADING,
              COPIES, HOST, IDLE)  # fmt: skip
"""Rows of the table. ``host`` is Python, DeepSpeed, views, allocations and dispatch on a CPU.
``idle`` is the time in which a GPU waits for the CPU."""


class Mark(NamedTuple):
    """Meaning of an event's name: the phase that it opens; the category of events inside it that
    have none of their own; the category of its own time; and whether it is an operator, whose own
    time is work rather than overhead."""

    phase: str | None
    context: str | None
    own: str | None
    operator: bool


class Label(NamedTuple):
    """Label of an event, derived from its own name and the events around it: its phase, its context
    (attention, norm, embedding, loss or None), and the category of its own time."""

    phase: str = REST
    context: str | None = None
    category: str = HOST


_CONTEXTS = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (ATTENTION, r"scaled_dot_product|flash_attn|FlashAttn|ScaledDotProduct|_flash_attention"
         r"|_efficient_attention|flex_attention"),
        (LOSS, r"cross_?entropy|nll_loss|NllLoss|log_softmax|LogSoftmax"),
        (NORMS, r"layer_norm|LayerNorm|rms_?norm|RMSNorm|RmsNorm|group_norm|batch_norm"),
        (EMBEDDING, r"aten::_?embedding|EmbeddingBackward|EmbeddingDenseBackward"),
    )
]  # fmt: skip
_COLLECTIVE = re.compile(
    r"c10d::|gloo:|nccl:|mpi:|ucc:|record_param_comms|_?c10d_functional::|megatron::receive"
)
_BATCHED = re.compile(r"aten::(bmm|baddbmm|_?safe_softmax|softmax|_softmax)")
_GEMM = re.compile(
    r"aten::(mm|addmm|_addmm_activation|linear|linear_backward|matmul|mv|addmv|_scaled_mm"
    r"|_int_mm|_grouped_mm|mkldnn_linear)|mkldnn::_?linear|mkl::_mkl_linear"
    r"|(cpp|triton)_\w*(gemm|_mm_|_mm$|addmm)"
)
_COPY = re.compile(
    r"aten::(copy_|_to_copy|to|type_as|contiguous|clone|cat|_cat|stack|repeat|repeat_interleave"
    r"|fill_|zero_|zeros|zeros_like|ones|ones_like|full|full_like|new_zeros|new_ones|new_full"
    r"|pin_memory|_pin_memory|_foreach_copy_|_foreach_zero_|concat|flatten_dense_tensors"
    r"|constant_pad_nd|pad|arange|roll|flip)$"
)
_HOST_OPERATOR = re.compile(
    r"aten::(t|transpose|transpose_|numpy_T|permute|view|view_as|_unsafe_view|_reshape_alias"
    r"|reshape|reshape_as|as_strided|as_strided_|expand|expand_as|slice|select|narrow|unbind"
    r"|split|split_with_sizes|chunk|squeeze|squeeze_|unsqueeze|unsqueeze_|flatten|unflatten|alias"
    r"|detach|detach_|empty|empty_like|empty_strided|new_empty|new_empty_strided|resize_|set_|item"
    r"|_local_scalar_dense|is_nonzero|lift_fresh|result_type|record_stream|unflatten_dense_tensors"
    r"|data|requires_grad_|is_pinned|resolve_conj|resolve_neg|can_cast|_has_compatible_"
    r"shallow_copy_type|_version|is_same_size|_nested_tensor_from_mask_left_aligned)$"
    r"|detach_?$|profiler::|torch::autograd|TorchDynamo|## Call|Torch-Compiled Region"
    r"|CompiledFunction|Optimizer\."
)
# Names of inductor's kernels list what they fuse: graph_0_cpp_fused_add_native_layer_norm_2,
# triton_per_fused__to_copy_rms_norm_0.
_FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_(\w*?)_?\d*$")
_FUSED_KINDS = (
    (LOSS, re.compile(r"nll_loss|cross_entropy|log_softmax|logsumexp")),
    (ATTENTION, re.compile(r"scaled_dot_product|softmax")),
    # rsqrt and pow_sum occur in RMSNorm, forward and backward.
    (NORMS, re.compile(r"layer_norm|rms_norm|rsqrt|var_mean|pow_sum")),
    (EMBEDDING, re.compile(r"embedding")),
    (COPIES, re.compile(
        r"(?:_?(?:unsafe_view|to_copy|clone|copy|transpose|view|permute|cat|split|split_with_sizes"
        r"|expand|slice|squeeze|unsqueeze|t|zeros|full|empty|select|constant_pad_nd|new_zeros))*$"
    )),
)  # fmt: skip
_KERNELS = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (COMMUNICATION, r"nccl|rccl|AllReduce|AllGather|ReduceScatter|all_reduce_kernel"),
        (ATTENTION, r"flash|fmha|mha_|attention|sdpa|_attn_"),
        (GEMMS, r"gemm|gemv|cutlass|cublas|nvjet|xmma|Cijk_|splitK|_mm_|wgrad_alg"),
        (NORMS, r"layer_?norm|rms_?norm|GammaBeta|rowwise_moments"),
        (LOSS, r"cross_?entropy|nll_loss|log_?softmax"),
        (EMBEDDING, r"embedding|indexSelect"),
        (UPDATE, r"multi_tensor_apply|adam"),
    )
] + [(COPIES, re.compile(r"Memcpy|Memset|copy_kernel|CatArray|FillFunctor|bfloat16_copy|_copy"))]


@cache
def mark_of(name: str) -> Mark:
    """Return the meaning of a CPU event's name."""
    phase = next((phase for phase, pattern in _PHASES if pattern.match(name)), None)
    node = name.removeprefix("autograd::engine::evaluate_function: ")
    context = next((kind for kind, pattern in _CONTEXTS if pattern.search(node)), None)
    if _COLLECTIVE.match(name):
        return Mark(phase, None, COMMUNICATION, True)
    if (fused := _fused_kind(name)) is not None:
        return Mark(phase, None, fused, True)
    operator = "::" in name and not name.startswith(("autograd::", "megatron::", "torch::"))
    if name != node or (node.endswith(("Backward", "Backward0", "Backward1")) and not operator):
        return Mark(phase, context, HOST, False)  # its own time is autograd's overhead
    for own, pattern in ((GEMMS, _GEMM), (ATTENTION, _BATCHED), (COPIES, _COPY)):
        if pattern.match(name):
            return Mark(phase, context, own, operator)
    is_host = _HOST_OPERATOR.match(name) or not operator
    return Mark(phase, context, HOST if is_host else None, operator)


def _fused_kind(name: str) -> str | None:
    """Return the category of a kernel fused by inductor, or None for other names."""
    match = _FUSED.search(name)
    if match is None:
        return None
    kinds = (k for k, p in _FUSED_KINDS if (p.match if k == COPIES else p.search)(match[1]))
    return next(kinds, ELEMENTWISE)


def label_inside(parent: Label, name: str, context: str | None = None) -> Label:
    """Return the label of an event of this name inside another event. ``context`` is the context of
    the forward operator whose gradient the event computes."""
    mark = mark_of(name)
    phase = mark.phase or parent.phase
    within = mark.context or context or parent.context
    if parent.context == ATTENTION:
        within = ATTENTION  # a softmax or norm inside attention belongs to it
    return Label(phase, within, _category(mark, phase, within))


def _category(mark: Mark, phase: str, context: str | None) -> str:
    if mark.own == COMMUNICATION:
        return COMMUNICATION
    if phase == DATA:
        return LOADING
    if not mark.operator:
        return mark.own or HOST
    if context == ATTENTION:
        return ATTENTION
    if mark.own in (GEMMS, HOST):
        return mark.own
    if context is not None:
        return context
    if phase == OPTIMIZER and mark.own != COPIES:
        return UPDATE
    return mark.own or ELEMENTWISE


@cache
def _kernel_kind(name: str) -> str | None:
    """Return the category that a kernel's name implies, or None if the name is ambiguous."""
    return _fused_kind(name) or next((kind for kind, p in _KERNELS if p.search(name)), None)


def kernel_category(name: str, launch: Label | None) -> str:
    """Return a kernel's category, given its name and ``launch``, the label of the event that
    launched it (None if unknown)."""
    kind = _kernel_kind(name)
    if kind == COMMUNICATION or launch is None:
        return kind or ELEMENTWISE
    if launch.context == ATTENTION or kind == ATTENTION:
        return ATTENTION
    if kind == GEMMS:
        return ATTENTION if launch.category == ATTENTION else GEMMS
    if launch.context is not None:
        return launch.context
    if launch.phase == OPTIMIZER and kind != COPIES:
        return UPDATE
    if kind is None or kind == UPDATE:
        # multi_tensor_apply implements all _foreach operators.
        return launch.category if launch.category not in (HOST, LOADING) else ELEMENTWISE
    return kind
