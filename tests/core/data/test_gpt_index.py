"""The sample order, against megatron-core's and against its definition token by token."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import GPTIndex, plan_epochs
from megatron.data.index_cache import IndexCache, StoredArrays

GOLDEN = Path(__file__).parents[2] / "golden" / "gpt_sample_order" / "golden.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())}


def build_gpt_index(*args) -> StoredArrays:
    index = GPTIndex.of(*args)
    arrays = IndexCache(None).arrays("x", {}, index.arrays)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == index.layout
    return arrays


def samples_by_definition(
    lengths: list[int], documents: range, s: int, wanted: int, seed: int
) -> list[list[tuple[int, int]]]:
    """Every sample in the order it is seen, each a list of s + 1 (document, offset).

    Plain loops over single tokens, straight from the definition of the order.
    """
    tokens_per_epoch = sum(lengths[d] for d in documents)
    epochs = 1
    while (epochs * tokens_per_epoch - 1) // s < wanted:
        epochs += 1
    total = (epochs * tokens_per_epoch - 1) // s
    separate = False
    if epochs > 1:
        n1 = ((epochs - 1) * tokens_per_epoch - 1) // s
        per_epoch = (tokens_per_epoch - 1) // s
        separate = wanted - n1 < int(0.80 * per_epoch)
    rng = np.random.RandomState(seed)

    def shuffled(values: list[int], dtype: type) -> list[int]:
        array = np.array(values, dtype)
        rng.shuffle(array)
        return array.tolist()

    if separate:
        order = shuffled(list(documents) * (epochs - 1), np.int32)
        order += shuffled(list(documents), np.int32)
    else:
        order = shuffled(list(documents) * epochs, np.int32)
    stream = [(d, offset) for d in order for offset in range(lengths[d])]
    numbers = list(range(total))
    if separate:
        numbers = shuffled(numbers[:n1], np.uint32) + shuffled(numbers[n1:], np.uint32)
    else:
        numbers = shuffled(numbers, np.uint32)
    return [stream[i * s : i * s + s + 1] for i in numbers]


def samples_of_index(
    lengths: np.ndarray, documents: range, s: int, wanted: int, seed: int
) -> list[list[tuple[int, int]]]:
    index = build_gpt_index(lengths, documents, s, wanted, seed)
    samples = []
    for row in index["shuffle_index"].tolist():
        (position, offset), last = (
            index["sample_index"][row].tolist(),
            index["sample_index"][row + 1],
        )
        sample = []
        while (position, offset) <= tuple(last.tolist()):
            document = int(index["document_index"][position])
            if offset < lengths[document]:
                sample.append((document, offset))
                offset += 1
            else:
                position, offset = position + 1, 0
        samples.append(sample)
    return samples


@pytest.mark.parametrize("block", [3, gpt_dataset._DOCUMENTS_AT_ONCE])
@pytest.mark.parametrize("name", CASES)
def test_against_megatron_core_golden(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(gpt_dataset, "_DOCUMENTS_AT_ONCE", block)
    index = build_gpt_index(
        np.array(case["lengths"], np.int32),
        range(*case["documents"]),
        case["seq_length"],
        case["num_samples"],
        case["seed"],
    )
    assert index["document_index"].tolist() == case["document_index"]
    assert index["sample_index"].tolist() == case["sample_index"]
    assert index["shuffle_index"].tolist() == case["shuffle_index"]
    assert index["document_index"].dtype == index["sample_index"].dtype == np.int32
    assert index["shuffle_index"].dtype == np.uint32


def test_golden_cases_cover_both_kinds_of_last_epoch() -> None:
    plans = [
        plan_epochs(
            sum(case["lengths"][slice(*case["documents"])]), case["seq_length"], case["num_samples"]
        )
        for case in CASES.values()
    ]
    assert sum(plan.epochs == 1 for plan in plans) >= 2
    assert sum(plan.epochs > 1 and plan.separate_from is None for plan in plans) >= 3
    assert sum(plan.separate_from is not None for plan in plans) >= 3


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    s=st.integers(1, 20),
    wanted=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_against_the_definition(
    lengths: list[int], s: int, wanted: int, seed: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(lengths) - 1))
    documents = range(start, data.draw(st.integers(start + 1, len(lengths))))
    array = np.array(lengths, np.int32)
    if not array[start : documents.stop].any():
        with pytest.raises(ValueError, match="no tokens"):
            build_gpt_index(array, documents, s, wanted, seed)
        return
    expected = samples_by_definition(lengths, documents, s, wanted, seed)
    assert samples_of_index(array, documents, s, wanted, seed) == expected
    assert len(expected) >= wanted
    assert {len(sample) for sample in expected} == {s + 1}


def test_threshold_of_the_separate_last_epoch() -> None:
    # 1000 tokens, s = 10: 99 samples per epoch, 199 in two; separate below int(79.2) = 79.
    assert plan_epochs(1000, 10, 99).epochs == 1
    assert plan_epochs(1000, 10, 99 + 78).separate_from == 99
    assert plan_epochs(1000, 10, 99 + 79).separate_from is None
    assert plan_epochs(1000, 10, 199).epochs == 2
    assert plan_epochs(1000, 10, 200).epochs == 3


def test_exact_epochs_are_those_of_a_run_over_all_their_samples() -> None:
    assert plan_epochs(1000, 10, 5, exact_epochs=3) == plan_epochs(1000, 10, 299)
    assert plan_epochs(1000, 10, 5000, exact_epochs=1) == plan_epochs(1000, 10, 99)


def test_plan_of_a_huge_corpus() -> None:
    plan = plan_epochs(10**13, 4096, 10**10)
    assert plan.epochs == 5
    assert plan.total_samples == (5 * 10**13 - 1) // 4096


def test_offsets_past_2_to_the_31() -> None:
    """Token positions need int64 though lengths are int32."""
    lengths = np.full(4, 2**31 - 1, np.int32)
    index = build_gpt_index(lengths, range(4), 2**20, 5000, 1)
    position, offset = index["sample_index"][5000].tolist()
    assert position * (2**31 - 1) + offset == 5000 * 2**20
