"""Peak rates of devices."""

import pytest
import torch

from megatron.features.measured_peak.products import measure_matmul_peak
from megatron.features.measured_peak.rates import peak_flops, peak_flops_of


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA H1000", None),
        ("", None),
    ],
)
def test_peak_by_device_name(name, peak):
    assert peak_flops_of(name) == peak


def test_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu")) is None


def test_measured_peak_is_what_a_matmul_reaches():
    peak = measure_matmul_peak(torch.float32, torch.device("cpu"), seconds=0.2)
    # From an emulated core to a large server.
    assert 1e8 < peak < 1e14
