"""Sizes and speeds of machines."""

import re
from pathlib import Path

import pytest

from megatron.apps.planning.step_time import Hardware, parse_bytes
from megatron.config import ConfigError
from megatron.features.measured_peak.rates import peak_flops_of


@pytest.mark.parametrize(
    "text, size", [("80GiB", 80 * 2**30), ("1.5GB", 1_500_000_000), ("3 MiB", 3 * 2**20)]
)
def test_sizes(text, size):
    assert parse_bytes("--gpu-memory", text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "80gib", "-3GiB", "80GiB x"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="--gpu-memory .*80GiB"):
        parse_bytes("--gpu-memory", text)


def test_the_help_has_the_peaks_of_the_log_lines():
    """--peak-tflops, and the default."""
    source = (Path(__file__).parents[3] / "megatron/apps/planning/step_time.py").read_text()
    named = re.search(r"TFLOP/s \((A100 .*)\)", source)
    assert named is not None
    peaks = re.findall(r"(\w\d+)(?: and (\w\d+))? (\d+)", named[1])
    assert [name for *names, _ in peaks for name in names if name] == [
        *"A100 H100 H200 B200".split()
    ]
    for *names, peak in peaks:
        assert all(peak_flops_of(name) == float(peak) * 1e12 for name in names if name)
    assert Hardware().peak_tflops * 1e12 == peak_flops_of("A100")


def test_a_ring_leaves_a_node_by_the_links_of_all_its_members():
    hardware = Hardware(32, gpus_per_node=8, intra_node_bandwidth=300, inter_node_bandwidth=25)
    assert hardware.ring_bandwidth(8, 1) == 300e9
    assert hardware.ring_bandwidth(16, 1) == 200e9
    assert hardware.ring_bandwidth(4, 4) == 50e9
    assert hardware.ring_bandwidth(4, 8) == 25e9
    assert hardware.link_bandwidth(2, 4) == 300e9
    assert hardware.link_bandwidth(2, 8) == 25e9


@pytest.mark.parametrize(
    "values, message",
    [
        ({"gpus": None}, "--gpus is missing"),
        ({"gpus": 0}, "--gpus 0 must be positive"),
        ({"utilisation": 1.5}, "--utilisation 1.5"),
        ({"data_overlap": -1.0}, "--data-overlap -1.0 must be from 0 to 1"),
        ({"memory_reserve": "80GiB"}, "leaves nothing"),
        ({"peak_tflops": float("nan")}, "--peak-tflops nan must be positive"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        Hardware(**({"gpus": 8} | values)).check()
