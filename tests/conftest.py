"""Fixtures for all tests."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Tiny tensors on many threads spend their time waiting, above all where other tests run beside.
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # what unit and distributed tests share


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of public data that MEGATRON_TEST_DATA names; tests that need it are skipped
    without it."""
    folder = os.environ.get("MEGATRON_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEGATRON_TEST_DATA names no folder of public data")
    return Path(folder).resolve()
