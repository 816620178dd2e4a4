"""Parts of data without a prompt in common."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.index_cache import IndexCache
from megatron.data.sources import split_documents
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.examples import (
    InstructionExamples,
    InstructionRecipe,
    of_prompts,
)
from megatron.features.instruction.flags import InstructionConfig

from .conftest import Built


def parts_of(hashes: list[int], split: str = "60,30,10") -> list[list[int]]:
    found = []
    for units in split_documents(split, len(hashes)):
        try:
            found.append(of_prompts(np.array(hashes, np.uint64), units, "here").tolist())
        except ValueError:
            found.append([])
    return found


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_every_example_is_in_the_one_part_of_its_prompt(hashes: list[int]) -> None:
    parts = parts_of(hashes)
    assert sorted(sum(parts, [])) == list(range(len(hashes)))
    prompts = [{hashes[n] for n in part} for part in parts]
    assert not prompts[0] & prompts[1] and not (prompts[0] | prompts[1]) & prompts[2]
    # In another order of the files the same prompts are held out.
    again = parts_of(hashes[::-1])
    assert [{hashes[::-1][n] for n in part} for part in again] == prompts


def test_different_prompts_are_divided_as_asked() -> None:
    hashes = np.random.default_rng(0).permutation(100).tolist()
    assert list(map(len, parts_of(hashes))) == [60, 30, 10]
    before = set(parts_of(hashes)[1])
    assert before != set(range(60, 90))
    # Of further examples only those near the borders change the part of others.
    assert len(before - set(parts_of([*hashes, 1000, 1001])[1])) <= 2


def test_a_part_without_a_prompt_is_named() -> None:
    with pytest.raises(ValueError, match=r"here: --split-by prompt .* 2 of 6 .* \(1 diff"):
        of_prompts(np.zeros(6, np.uint64), range(4, 6), "here")


@pytest.mark.parametrize("loss_on", ["all", "everything"])
def test_instructions_by_prompt(loss_on: str, gpt2: Built, write) -> None:
    """Two answers to each prompt, far from each other in the file. Where the prompt counts in the
    loss too, an example is its own prompt."""
    planets = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
    records = [{"prompt": planet, "completion": f" {n}"} for n in (1, 2) for planet in planets]
    config = InstructionConfig(loss_on=loss_on, split_by="prompt")
    encoder = ExampleEncoder(config, gpt2.tokenizer, gpt2.config)
    examples = InstructionExamples.open(write(records), encoder)
    recipe = InstructionRecipe.from_config(config, 64, 5, gpt2.tokenizer)
    assert recipe.by_prompt
    used = []
    for name, units in (("train", range(10)), ("valid", range(10, 16))):
        data = recipe.build(examples, units, 1, name, IndexCache(None))
        used.append(sorted(data.origin(i)[0].sequence for i in range(len(data))))
    assert sorted(used[0] + used[1]) == list(range(16))
    apart = {n % 8 for n in used[0]} & {n % 8 for n in used[1]}
    assert bool(apart) is (loss_on == "everything")
