"""The compiled shuffle, against NumPy's."""

import numpy as np
import pytest

from megatron.data import gpt_dataset as shuffle_module
from megatron.data.gpt_dataset import shuffle


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_against_numpy(seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(shuffle_module, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(shuffle_module, "_DRAWN_AT_ONCE", 100)
    ours, numpys = np.random.RandomState(seed), np.random.RandomState(seed)
    # Around powers of two, where the number of bits changes; several times from one generator.
    for length in (0, 1, 2, 3, 4, 5, 63, 64, 65, 66, 127, 128, 129, 1000, 4097):
        array, expected = np.arange(length, dtype=dtype), np.arange(length, dtype=dtype)
        shuffle(ours, array)
        numpys.shuffle(expected)
        assert array.tolist() == expected.tolist()
        assert ours.randint(1 << 30) == numpys.randint(1 << 30)
        assert ours.standard_normal() == numpys.standard_normal()


def test_part_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(shuffle_module, "_WORTH_COMPILING", 0)
    array, expected = np.arange(1000), np.arange(1000)
    shuffle(np.random.RandomState(3), array[200:])
    np.random.RandomState(3).shuffle(expected[200:])
    assert array.tolist() == expected.tolist()


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_module, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(shuffle_module, "find_numba", lambda: None)
    array, expected = np.arange(1000), np.arange(1000)
    shuffle(np.random.RandomState(3), array)
    np.random.RandomState(3).shuffle(expected)
    assert array.tolist() == expected.tolist()


@pytest.mark.proof
def test_a_long_array_against_numpy() -> None:
    pytest.importorskip("numba")
    array = np.arange(shuffle_module._WORTH_COMPILING + 12_345, dtype=np.uint32)
    expected = array.copy()
    shuffle(np.random.RandomState(7), array)
    np.random.RandomState(7).shuffle(expected)
    assert np.array_equal(array, expected)
