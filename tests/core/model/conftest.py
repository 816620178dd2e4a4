"""Models here are so small that a second thread costs more than it brings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Modules that the tests of this folder share.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
