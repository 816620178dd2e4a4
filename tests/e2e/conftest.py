"""The process that this folder's tests fork their trainings from."""

import pytest
from warm_runs import WarmRuns


@pytest.fixture(scope="session")
def warm():
    runs = WarmRuns("pretrain_gpt", "megatron.features.agreement.facts")
    yield runs
    runs.stop()
