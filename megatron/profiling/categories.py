"""What kind of work an operator or a kernel is, told by its name and by what it lies in.

Names are those of torch's operators (``aten::mm``), of autograd's nodes (``MmBackward0``), of
inductor's fused kernels (which list what they fuse), and of the kernels of cuBLAS, cuDNN, CUTLASS,
flash-attention, NCCL and torch on GPUs.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from megatron.profiling.scopes import DATA, OPTIMIZER, RECEIVE_SCOPE, REST, phase_of

ATTENTION, PRODUCTS, NORMS = "attention", "matrix products", "norms"
ELEMENTWISE, EMBEDDING, LOSS = "elementwise", "embedding", "loss"
UPDATE, COMMUNICATION, LOADING = "optimizer", "communication", "data"
COPIES, HOST, IDLE = "copies and casts", "host", "idle"
CATEGORIES = {
    ATTENTION: "kernels of attention, its batched products and softmax",
    PRODUCTS: "products with weights",
    NORMS: "LayerNorm, RMSNorm",
    ELEMENTWISE: "activation, rotary angles, residual, dropout, sums of gradients",
    EMBEDDING: "rows of the token table taken, gradients added to it",
    LOSS: "cross entropy and its mean",
    UPDATE: "the update, norm of the gradients, clipping",
    COMMUNICATION: "waiting for collectives, beside which nothing else runs",
    LOADING: "waiting for batches",
    COPIES: "casts, copies, concatenation, fills",
    HOST: "Python, DeepSpeed, views, allocations, dispatch",
    IDLE: "the device waits for the host",
}
"""Each category and what is in it. A CPU's step has no idle time, a GPU's no host time."""


class Mark(NamedTuple):
    """What a name says.

    Attributes:
        phase: the phase that it opens.
        context: the category of all that lies inside, unless that says something else.
        own: the category of its own time; None where the name says nothing (a scope, a node of
            autograd, an operator whose work is elementwise).
        operator: whether it is an operator, whose own time is work.
    """

    phase: str | None
    context: str | None
    own: str | None
    operator: bool


class Place(NamedTuple):
    """Where something happens: what its ancestors and its own name come to.

    Attributes:
        phase: phase of the step.
        context: attention, norm, embedding, loss; None in none of these.
        category: category of the innermost event's own time.
        name: name of the innermost event.
    """

    phase: str = REST
    context: str | None = None
    category: str = HOST
    name: str = ""


_CONTEXTS = (
    (ATTENTION, r"scaled_dot_product|flash_attn|FlashAttn|ScaledDotProduct|_efficient_attention"
     r"|_flash_attention|flex_attention"),
    (LOSS, r"cross_?entropy|nll_loss|NllLoss|log_softmax|LogSoftmax"),
    (NORMS, r"layer_norm|LayerNorm|rms_?norm|RMSNorm|RmsNorm|group_norm|batch_norm"),
    (EMBEDDING, r"aten::_?embedding|EmbeddingBackward|EmbeddingDenseBackward"),
)  # fmt: skip
_CONTEXT_PATTERNS = [(kind, re.compile(p, re.IGNORECASE)) for kind, p in _CONTEXTS]
_COLLECTIVE = re.compile(
    r"c10d::|gloo:|nccl:|mpi:|ucc:|record_param_comms|_?c10d_functional::|" + RECEIVE_SCOPE
)
_BATCHED = re.compile(r"aten::(bmm|baddbmm|_?safe_softmax|softmax|_softmax)")
_PRODUCT = re.compile(
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
# What inductor fused, in its kernels' names: graph_0_cpp_fused_add_native_layer_norm_2,
# triton_per_fused__to_copy_rms_norm_0.
_FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_(\w*?)_?\d*$")
_FUSED_KINDS = (
    (LOSS, re.compile(r"nll_loss|cross_entropy|log_softmax|logsumexp")),
    (ATTENTION, re.compile(r"scaled_dot_product|softmax")),
    # rsqrt, pow_sum: RMSNorm in parts, forward and backward.
    (NORMS, re.compile(r"layer_norm|rms_norm|rsqrt|var_mean|pow_sum")),
    (EMBEDDING, re.compile(r"embedding")),
)
_ONLY_COPIES = re.compile(
    r"(?:_?(?:unsafe_view|to_copy|clone|copy|transpose|view|permute|cat|split|split_with_sizes"
    r"|expand|slice|squeeze|unsqueeze|t|zeros|full|empty|select|constant_pad_nd|new_zeros))*"
)


@cache
def mark_of(name: str) -> Mark:
    """What a host event's name says."""
    phase = phase_of(name)
    node = name.removeprefix("autograd::engine::evaluate_function: ")
    context = next((kind for kind, p in _CONTEXT_PATTERNS if p.search(node)), None)
    if _COLLECTIVE.match(name):
        return Mark(phase, None, COMMUNICATION, True)
    fused = _fused_kind(name)
    if fused is not None:
        return Mark(phase, None, fused, True)
    operator = "::" in name and not name.startswith(("autograd::", "megatron::", "torch::"))
    if name != node or (node.endswith(("Backward", "Backward0", "Backward1")) and not operator):
        return Mark(phase, context, HOST, False)  # its own time is autograd's
    if _PRODUCT.match(name):
        return Mark(phase, context, PRODUCTS, operator)
    if _BATCHED.match(name):
        return Mark(phase, context, ATTENTION, operator)
    if _COPY.match(name):
        return Mark(phase, context, COPIES, operator)
    if _HOST_OPERATOR.match(name) or not operator:
        return Mark(phase, context, HOST, operator)
    return Mark(phase, context, None, operator)


def _fused_kind(name: str) -> str | None:
    """The category of a kernel that inductor fused; None for other names."""
    found = _FUSED.search(name)
    if found is None:
        return None
    for kind, pattern in _FUSED_KINDS:
        if pattern.search(found[1]):
            return kind
    return COPIES if _ONLY_COPIES.fullmatch(found[1]) else ELEMENTWISE


def inside(parent: Place, name: str, context: str | None = None) -> Place:
    """Where an event of this name is, that lies in ``parent``.

    Args:
        parent: where it lies.
        name: its name.
        context: that of the forward operator whose gradient it computes.
    """
    mark = mark_of(name)
    phase = mark.phase or parent.phase
    within = mark.context or context or parent.context
    if parent.context == ATTENTION:
        within = ATTENTION  # a softmax or a norm inside is the kernel's own
    return Place(phase, within, _category(mark, phase, within), name)


def _category(mark: Mark, phase: str, context: str | None) -> str:
    if mark.own == COMMUNICATION:
        return COMMUNICATION
    if phase == DATA:
        return LOADING
    if not mark.operator:
        return mark.own or HOST
    if context == ATTENTION:
        return ATTENTION
    if mark.own in (PRODUCTS, HOST):
        return mark.own
    if context is not None:
        return context
    if phase == OPTIMIZER and mark.own != COPIES:
        return UPDATE
    return mark.own or ELEMENTWISE


_KERNELS = (
    (COMMUNICATION, r"nccl|rccl|AllReduce|AllGather|ReduceScatter|all_reduce_kernel"),
    (ATTENTION, r"flash|fmha|mha_|attention|sdpa|_attn_"),
    (PRODUCTS, r"gemm|gemv|cutlass|cublas|nvjet|xmma|Cijk_|splitK|_mm_|wgrad_alg"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta|rowwise_moments"),
    (LOSS, r"cross_?entropy|nll_loss|log_?softmax"),
    (EMBEDDING, r"embedding|indexSelect"),
    (UPDATE, r"multi_tensor_apply|adam"),
)
_KERNEL_PATTERNS = [(kind, re.compile(p, re.IGNORECASE)) for kind, p in _KERNELS]
_COPY_KERNEL = re.compile(r"Memcpy|Memset|copy_kernel|CatArray|FillFunctor|bfloat16_copy|_copy")


@cache
def _kernel_kind(name: str) -> str | None:
    """The category that a kernel's name tells; None where it could be many things."""
    fused = _fused_kind(name)
    if fused is not None:
        return fused
    kind = next((kind for kind, p in _KERNEL_PATTERNS if p.search(name)), None)
    return COPIES if kind is None and _COPY_KERNEL.search(name) else kind


def kernel_category(name: str, place: Place | None) -> str:
    """The category of a kernel.

    Args:
        name: its name.
        place: where the host started it; None if that is not known.
    """
    kind = _kernel_kind(name)
    if kind == COMMUNICATION or place is None:
        return kind or ELEMENTWISE
    if place.context == ATTENTION or kind == ATTENTION:
        return ATTENTION
    if kind == PRODUCTS:
        return ATTENTION if place.category == ATTENTION else PRODUCTS
    if place.context is not None:
        return place.context
    if place.phase == OPTIMIZER and kind != COPIES:
        return UPDATE
    if kind is None or kind == UPDATE:
        # multi_tensor_apply is the machine of all _foreach operators.
        return place.category if place.category not in (HOST, LOADING) else ELEMENTWISE
    return kind
