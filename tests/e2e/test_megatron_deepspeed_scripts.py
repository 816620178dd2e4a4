"""Megatron-DeepSpeed's scripts train at small size on real text, from their own commands."""

import pytest
from script_runs import Data, rows, run

pytestmark = [pytest.mark.proof, pytest.mark.realdata]


@pytest.fixture(scope="module")
def data(realdata, tmp_path_factory):
    return Data.of(realdata, tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.path)
def test_script_runs_small(row, data, tmp_path):
    assert run(row, data, tmp_path)
