"""A GPU's step, by traces in Kineto's form that were built by hand."""

import pytest
from kineto import MAIN, event, kernel, launch, scope, step, write

from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.tables import breakdown_text
from megatron.apps.profiling.trace import TraceError, read_trace

BACKWARD = 101
"""autograd's thread for the device."""


def device_step(number: int, start: float, end: float) -> dict:
    return event(f"ProfilerStep#{number}", start, end, cat="gpu_user_annotation", tid=7)


@pytest.fixture
def found(tmp_path):
    """One step, of which the device sees 20 to 120."""
    events = [
        step(1, 0, 100),
        device_step(1, 20, 120),
        scope("megatron::forward", 10, 30),
        event("aten::mm", 11, 14, Input_Dims=[[64, 32], [32, 16]], Sequence_number=1),
        launch(1, 12),
        event("aten::scaled_dot_product_attention", 15, 19, Sequence_number=2),
        launch(2, 16),
        event("aten::bmm", 20, 23, Input_Dims=[[2, 4, 4], [2, 4, 4]], Sequence_number=3),
        launch(3, 21),
        scope("megatron::backward", 31, 60),
        event(
            "autograd::engine::evaluate_function: MmBackward0", 32, 38, tid=BACKWARD,
            Sequence_number=1,
        ),
        event("aten::mm", 33, 37, tid=BACKWARD, Input_Dims=[[32, 64], [64, 16]]),
        launch(4, 34, tid=BACKWARD),
        launch(5, 36, tid=BACKWARD),
        event("c10d::reduce_scatter_", 40, 44, tid=BACKWARD),
        launch(6, 41, tid=BACKWARD),
        scope("megatron::optimizer", 61, 90),
        event("aten::_fused_adamw_", 62, 66),
        launch(7, 63),
        event("aten::item", 70, 88),
        event("aten::_local_scalar_dense", 70, 88),
        event("cudaStreamSynchronize", 72, 87, cat="cuda_runtime", correlation=99),
        # What the device does: 20-30 product, 30-36 attention, idle 36-40, 40-44 its product,
        # 44-60 and 60-62 the two kernels of one product, next to them 50-70 a collective of which
        # 62-70 stands alone, idle 70-80, 80-110 the update, idle 110-120.
        kernel("sm90_xmma_gemm_bf16", 1, 20, 30),
        kernel("flash_fwd_kernel<128>", 2, 30, 36),
        kernel("sm90_xmma_gemm_bf16_batched", 3, 40, 44),
        kernel("nvjet_hsh_128x128", 4, 44, 60),
        kernel("splitKreduce_kernel<32>", 5, 60, 62),
        kernel(
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 6, 50, 70, stream=20,
            **{"Collective_name": "_reduce_scatter_base", "In_msg_nelems": 1000,
               "dtype": "BFloat16"},
        ),
        kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 7, 80, 110),
    ]  # fmt: skip
    return break_down(read_trace(write(tmp_path / "gpu.json", *events)))


def test_every_moment_of_the_device_is_counted_once(found):
    assert found.on_device and found.step == pytest.approx(100)
    assert dict(found.cells) == pytest.approx(
        {
            ("matrix products", "forward"): 10,
            ("attention", "forward"): 6 + 4,
            ("matrix products", "backward"): 16 + 2,
            ("communication", "backward"): 8,
            ("optimizer", "optimizer"): 30,
            # By what the training thread does meanwhile: 36-40 it is in the backward pass, 70-80
            # in the optimizer, 110-120 behind the step.
            ("idle", "backward"): 4,
            ("idle", "optimizer"): 10,
            ("idle", "rest"): 10,
        }
    )
    assert sum(found.cells.values()) == pytest.approx(100)


def test_communication_next_to_computing(found):
    assert found.hidden == pytest.approx(12)
    (collective,) = found.collectives
    assert collective.name == "_reduce_scatter_base" and collective.time == pytest.approx(20)
    assert collective.amount == 2000


def test_products_are_timed_by_their_kernels(found):
    shapes = {(p.name, p.phase): (p.calls, p.time, p.amount) for p in found.gemms}
    assert shapes == {
        ("64 x 32 x 16", "forward"): (1, pytest.approx(10), 65536),
        ("32 x 64 x 16", "backward"): (1, pytest.approx(18), 65536),
    }


def test_host_synchronisations(found):
    waits = {wait.name: (wait.phase, wait.calls, wait.time) for wait in found.waits}
    assert waits == {
        "aten::_local_scalar_dense": ("optimizer", 1, pytest.approx(18)),
        "cudaStreamSynchronize": ("optimizer", 1, pytest.approx(15)),
    }


def test_the_table_names_the_device(found):
    text = breakdown_text(found)
    assert "(GPU time)" in text and "idle" in text and "host  " not in text.split("\n\n")[1]


def test_kernels_at_once_count_once(tmp_path):
    """Two streams: the kernel that began first counts; a copy that nothing started, or a thread
    without operators, is known by its name; a collective inside a product is hidden whole."""
    events = [
        step(1, 0, 50),
        launch(1, 1, tid=MAIN),
        kernel("sm90_xmma_gemm", 1, 10, 30),
        kernel("Memcpy HtoD (Pinned -> Device)", 50, 20, 36, stream=9),
        launch(49, 2, tid=300),
        kernel("Memcpy HtoD (Pageable -> Device)", 49, 36, 40, stream=9),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 51, 12, 28, stream=20),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 52, 35, 46, stream=20),
        kernel("ncclDevKernel_AllGather_RING", 53, 44, 48, stream=21),
        kernel("ncclDevKernel_AllGather_RING", 54, 45, 48, stream=22),
    ]
    found = break_down(read_trace(write(tmp_path / "gpu.json", *events)))
    assert dict(found.cells) == pytest.approx(
        {
            ("matrix products", "rest"): 20,
            ("copies and casts", "rest"): 10,
            ("communication", "rest"): 8,
            ("idle", "rest"): 12,
        }
    )
    assert found.hidden == pytest.approx(16 + 5)
    assert {c.name: c.time for c in found.collectives} == {
        "nccl:AllReduce": pytest.approx(27), "nccl:AllGather": pytest.approx(4),
    }  # fmt: skip


def test_least_is_for_the_cpu(tmp_path):
    path = write(tmp_path / "gpu.json", step(1, 0, 10), kernel("gemm", 1, 2, 4))
    with pytest.raises(TraceError, match="gpu.json: --least is for the time of a CPU"):
        break_down(read_trace(path), least=True)
