"""Operators and kernels by their names, as torch 2.13 and its libraries write them."""

import pytest

from megatron.apps.profiling.categories import Label, kernel_category, label_inside

OPERATORS = {
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "aten::_scaled_mm": "matrix products",
    "aten::linear": "matrix products",
    "mkldnn::_linear_pointwise": "matrix products",
    "aten::bmm": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::_flash_attention_forward": "attention",
    "aten::native_layer_norm": "norms",
    "aten::native_layer_norm_backward": "norms",
    "aten::_fused_rms_norm": "norms",
    "aten::embedding": "embedding",
    "aten::embedding_dense_backward": "embedding",
    "aten::nll_loss_forward": "loss",
    "aten::_log_softmax": "loss",
    "aten::gelu": "elementwise",
    "aten::silu": "elementwise",
    "aten::mul": "elementwise",
    "aten::add_": "elementwise",
    "aten::copy_": "copies and casts",
    "aten::_to_copy": "copies and casts",
    "aten::cat": "copies and casts",
    "aten::fill_": "copies and casts",
    "aten::view": "host",
    "aten::t": "host",
    "aten::empty_strided": "host",
    "aten::_local_scalar_dense": "host",
    "c10d::allreduce_": "communication",
    "gloo:all_reduce": "communication",
    "nccl:reduce_scatter": "communication",
    "megatron::receive": "communication",
    "megatron::forward": "host",
    "MmBackward0": "host",
    "autograd::engine::evaluate_function: MmBackward0": "host",
    "_LinearCrossEntropy": "host",
    "## Call CompiledFxGraph fabc ##": "host",
    "Torch-Compiled Region: 0/0": "host",
    "graph_0_cpp_fused_mul_silu_split_view_3": "elementwise",
    "graph_0_cpp_fused_add_native_layer_norm_view_2": "norms",
    "graph_0_cpp_fused__to_copy_add_mean_mul_pow_rsqrt_view_2": "norms",
    "graph_0_cpp_fused__to_copy_add_div_expand_mul_pow_sum_view_7": "norms",
    "graph_1_cpp_fused__to_copy_view_0": "copies and casts",
    "graph_0_cpp_fused_embedding_dense_backward_0": "embedding",
    "triton_per_fused_add_native_layer_norm_2": "norms",
    "triton_poi_fused_gelu_4": "elementwise",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    assert label_inside(Label(), name).category == OPERATORS[name]


def path(*names: str) -> Label:
    place = Label()
    for name in names:
        place = label_inside(place, name)
    return place


@pytest.mark.parametrize(
    "names, category, phase",
    [
        # What encloses an operator tells more than its own name.
        (("_LinearCrossEntropy", "aten::sub"), "loss", "rest"),
        (("_LinearCrossEntropy", "aten::_to_copy", "aten::copy_"), "loss", "rest"),
        (("_LinearCrossEntropy", "aten::mm"), "matrix products", "rest"),
        (("aten::scaled_dot_product_attention", "aten::softmax"), "attention", "rest"),
        (("aten::scaled_dot_product_attention", "aten::copy_"), "attention", "rest"),
        (("aten::layer_norm", "aten::copy_"), "norms", "rest"),
        (("megatron::forward", "aten::add"), "elementwise", "forward"),
        (("megatron::optimizer", "aten::mul_"), "optimizer", "optimizer"),
        (("megatron::optimizer", "aten::copy_"), "copies and casts", "optimizer"),
        (("megatron::optimizer", "c10d::allgather_"), "communication", "optimizer"),
        (("Optimizer.step#AdamW.step", "aten::_fused_adamw_"), "optimizer", "optimizer"),
        (("megatron::data", "aten::stack", "aten::cat"), "data", "data"),
        (("megatron::forward", "megatron::data"), "data", "data"),
        (("megatron::backward",), "host", "backward"),
        (
            ("autograd::engine::evaluate_function: GeluBackward0", "GeluBackward0", "aten::mul"),
            "elementwise",
            "backward",
        ),
        (
            ("autograd::engine::evaluate_function: _LinearCrossEntropyBackward", "aten::mul"),
            "loss",
            "backward",
        ),
    ],
)
def test_category_and_phase(names, category, phase):
    place = path(*names)
    assert (place.category, place.phase) == (category, phase)


def test_the_gradient_of_a_forward_operator_is_where_that_was():
    node = "autograd::engine::evaluate_function: MulBackward0"
    place = label_inside(label_inside(Label(), node, context="norms"), "aten::mul")
    assert (place.category, place.phase) == ("norms", "backward")


KERNELS = [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matrix products"),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>",
        "norms",
    ),
    ("void (anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "norms"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
    ("Memset (Device)", "copies and casts"),
    (
        "void at::native::elementwise_kernel<direct_copy_kernel_cuda>",
        "copies and casts",
    ),
    ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise"),
    ("triton_per_fused__to_copy_native_layer_norm_0", "norms"),
    ("triton_poi_fused_mul_silu_1", "elementwise"),
]


@pytest.mark.parametrize("name, category", KERNELS)
def test_kernels_by_name(name, category):
    assert kernel_category(name, None) == category


@pytest.mark.parametrize(
    "name, place, category",
    [
        # Products of attention are batched; their kernels are named like all others.
        ("sm90_xmma_gemm_bf16", path("aten::bmm"), "attention"),
        ("sm90_xmma_gemm_bf16", path("aten::mm"), "matrix products"),
        ("vectorized_elementwise_kernel", path("_LinearCrossEntropy", "aten::exp_"), "loss"),
        ("elementwise_kernel", path("megatron::optimizer", "aten::mul_"), "optimizer"),
        ("reduce_kernel", path("aten::embedding_dense_backward"), "embedding"),
        ("multi_tensor_apply_kernel", path("aten::_foreach_copy_"), "copies and casts"),
        ("ncclDevKernel_AllGather", path("megatron::optimizer"), "communication"),
    ],
)
def test_kernels_by_the_operator_that_starts_them(name, place, category):
    assert kernel_category(name, place) == category
