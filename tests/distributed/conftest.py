"""The worker pool that all distributed tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests say `from pool import ...`; importlib mode puts no folder on the path, and the workers
# inherit it.
sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes: ``pool.run(size, function, *args)`` gives what each rank returned."""
    workers = Pool()
    yield workers
    workers.close()
