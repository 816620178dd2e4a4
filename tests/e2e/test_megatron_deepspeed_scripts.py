"""Megatron-DeepSpeed's scripts train at small size on real text, from their own commands."""

import os
from pathlib import Path

import pytest
from script_runs import Data, rows, run

pytestmark = [pytest.mark.proof, pytest.mark.realdata]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    source = os.environ.get("MEGATRON_TEST_DATA")
    if source is None:
        pytest.skip("MEGATRON_TEST_DATA names no folder of public data")
    return Data.of(Path(source), tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.kind != "none"], ids=lambda row: row.path
)
def test_script_runs_small(row, data, tmp_path):
    assert run(row, data, tmp_path)
