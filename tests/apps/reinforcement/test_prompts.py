"""Prompts: what is read of records, their tokens against transformers, groups against trl."""

import pickle
from collections import Counter

import numpy as np
import pytest

from megatron.apps.reinforcement.data.prompts import (
    PromptExamples,
    PromptRecipe,
    RepeatedPrompts,
    collate_prompts,
    parse_prompt,
)
from megatron.data.blend import BlendedDataset
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import parse_example
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig

from ...features.instruction.conftest import CHATML, Built

USER = {"role": "user", "content": "Name the planets."}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Mercury, Venus"}


def opened(built: Built, path: str, **flags) -> PromptExamples:
    encoder = ExampleEncoder(InstructionConfig(**flags), built.tokenizer, built.config)
    return PromptExamples.open(path, encoder, IndexCache(None))


def dataset(examples: PromptExamples, samples: int = 1, longest: int = 100, name="train", **how):
    recipe = PromptRecipe(longest, 5, **how)
    return recipe.build(examples, range(len(examples)), samples, name, IndexCache(None))


@pytest.mark.parametrize(
    ("record", "text", "columns"),
    [
        ({"prompt": "1+1=", "answer": 2}, "1+1=", {"answer": 2}),
        # With a "prompt", others are for rewards, as in trl.
        ({"prompt": "1+1=", "input": "x", "query": "y"}, "1+1=", {"input": "x", "query": "y"}),
        ({"prompt": [USER], "answer": None}, ({**USER},), {"answer": None}),
        ({"question": "1+1?", "answer": "#### 2"}, "1+1?", {"answer": "#### 2"}),
        ({"messages": [SYSTEM, USER, ANSWER], "x": 1}, (SYSTEM, USER), {"x": 1}),
        (
            {"question": "Planets?", "system": "Be brief.", "answer": "8"},
            (SYSTEM, {"role": "user", "content": "Planets?"}),
            {"system": "Be brief.", "answer": "8"},
        ),
        ({"prompt": '[{"role": "user", "content": "a"}]'}, ({"role": "user", "content": "a"},), {}),
    ],
)  # fmt: skip
def test_columns_of_records(record: dict, text: object, columns: dict) -> None:
    parsed = parse_prompt(record)
    assert (parsed.text, parsed.columns) == (text, columns)


def test_flags_name_columns() -> None:
    columns = RecordColumns.of(InstructionConfig(prompt_column="problem", ignore_columns=("id",)))
    parsed = parse_prompt({"problem": "1+1?", "id": 7, "solution": "2"}, columns)
    assert (parsed.text, parsed.columns) == ("1+1?", {"solution": "2"})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r'no prompt \(its keys: "text"\); a record has "prompt"'),
        ({"prompt": ""}, '"prompt" is an empty prompt'),
        ({"prompt": 5}, '"prompt" must be a text or a list of messages, not 5'),
        ({"prompt": [USER, ANSWER]}, '"prompt" ends with an answer'),
        (["a"], "a record must be a JSON object"),
    ],
)
def test_wrong_records_are_named(record, message: str, gpt2: Built, write) -> None:
    path = write([{"prompt": "fine"}, record])
    with pytest.raises(ValueError, match=rf"data.jsonl, line 2: {message}"):
        opened(gpt2, path)


@pytest.mark.parametrize("turns", [[USER], [SYSTEM, USER], [USER, ANSWER, USER]])
def test_chat_prompts_against_transformers(turns: list[dict], with_template, write) -> None:
    built = with_template(CHATML)
    examples = opened(built, write([{"prompt": turns, "answer": [1, {"a": None}]}]))
    expected = built.tokenizer.transformers_tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompt = examples.prompt(0)
    assert prompt.tokens.tolist() == expected and prompt.tokens.dtype == np.int64
    assert prompt.text == tuple(turns) and prompt.columns == {"answer": [1, {"a": None}]}


def test_texts_are_read_as_they_are(with_template, write) -> None:
    """A chat template is for messages and questions, not for a text of the column "prompt"."""
    built = with_template(CHATML)
    examples = opened(built, write([{"prompt": "Name "}, {"question": "Name "}]))
    texts = [built.tokenizer.detokenize(examples.prompt(n).tokens.tolist()) for n in range(2)]
    assert texts[0] == "Name "
    assert texts[1].startswith("<|im_start|>user\nName <|im_end|>")
    assert texts[1].endswith("<|im_start|>assistant\n")


def test_plain_conversations_join_as_in_training(gpt2: Built, write) -> None:
    """The prompt of a conversation is the beginning of the example that training has of it."""
    turns = [USER, ANSWER, {"role": "user", "content": "And the large?"}]
    answer = {"role": "assistant", "content": "Jupiter"}
    prompt = opened(gpt2, write([{"prompt": turns}]), prompt_format="plain").prompt(0)
    encoder = ExampleEncoder(InstructionConfig(prompt_format="plain"), gpt2.tokenizer, gpt2.config)

    (whole,) = encoder([("here", parse_example({"messages": [*turns, answer]}))])
    counted = np.flatnonzero(whole.counted)
    last = counted[np.flatnonzero(np.diff(counted) > 1)[-1] + 1]
    assert prompt.tokens.tolist() == whole.tokens[:last].tolist()


def test_every_epoch_has_every_prompt_once(gpt2: Built, write) -> None:
    examples = opened(gpt2, write([{"prompt": f"{n}", "answer": n} for n in range(10)]))
    data = dataset(examples, samples=25)
    numbers = [data[n].prompt.number for n in range(len(data))]
    epochs = [numbers[start : start + 10] for start in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Of the order of a longer run a shorter one has the beginning.
    assert numbers[:10] == [dataset(examples)[n].prompt.number for n in range(10)]
    assert all(data[n].prompt.columns == {"answer": numbers[n]} for n in range(len(data)))
    again = pickle.loads(pickle.dumps(data))
    assert [again[n].prompt.number for n in range(len(data))] == numbers


def test_prompts_come_in_groups(gpt2: Built, write) -> None:
    examples = opened(gpt2, write([{"prompt": f"{n}"} for n in range(6)]))
    data = dataset(examples, samples=6)
    repeated = RepeatedPrompts(data, 4)
    samples = [repeated[n] for n in range(len(repeated))]
    assert [s.prompt.number for s in samples] == [data[n // 4].prompt.number for n in range(24)]
    assert [s.number for s in samples] == list(range(24))
    batch = collate_prompts(samples[3:6])
    assert batch.numbers == (3, 4, 5) and batch.to("cpu") is batch
    first = batch.prompts[0].tokens.tolist()
    assert batch.tokens_BS[0, : len(first)].tolist() == first


@pytest.mark.proof
def test_groups_are_those_of_trl(gpt2: Built, write) -> None:
    from trl.trainer.utils import RepeatSampler

    data = dataset(opened(gpt2, write([{"prompt": f"{n}"} for n in range(6)])))
    repeated = RepeatedPrompts(data, 4)
    sampler = RepeatSampler(list(range(6)), mini_repeat_count=4, batch_size=6, shuffle=False)
    numbers = [repeated[n].prompt.number for n in range(24)]
    assert numbers == [data[n].prompt.number for n in sampler]


def test_numbers_are_unique_among_files(gpt2: Built, write) -> None:
    parts = [
        dataset(opened(gpt2, write([{"prompt": f"{name}{n}"} for n in range(3)], f"{name}.jsonl")))
        for name in "ab"
    ]
    blend = BlendedDataset.build(parts, [0.5, 0.5], 6, IndexCache(None), "train")
    repeated = RepeatedPrompts(blend, 2)
    numbers = [repeated[n].prompt.number for n in range(12)]
    assert numbers[::2] == numbers[1::2] and sorted(set(numbers)) == list(range(6))
    texts = {repeated[n].prompt.number: repeated[n].prompt.text for n in range(12)}
    assert texts == {n: f"{'ab'[n // 3]}{n % 3}" for n in range(6)} and repeated.records == 6
    assert [len(part) for part in repeated.parts] == [6, 6]


def test_long_prompts_are_named(gpt2: Built, write, caplog) -> None:
    path = write([{"prompt": "planets " * count} for count in (1, 2, 40, 50)])
    examples = opened(gpt2, path)
    lengths = examples.sequence_lengths.tolist()
    with caplog.at_level("WARNING"):
        cut = dataset(examples, longest=lengths[1])
        data = dataset(examples, longest=lengths[1], skip_long=True)
    assert f"of 4 prompts 2 are longer than {lengths[1]} tokens" in caplog.text
    assert f"records (tokens) 3 ({lengths[2]}), 4 ({lengths[3]}); their begin" in caplog.text
    assert sorted(data[n].prompt.number for n in range(len(data))) == [0, 1]
    by_number = {cut[n].prompt.number: (cut[n].prompt, cut.origin(n)[0]) for n in range(4)}
    for number, (prompt, piece) in by_number.items():
        assert prompt.tokens.tolist() == examples.get(number)[piece.start :].tolist()
        assert len(prompt.tokens) == min(lengths[number], lengths[1])
    with pytest.raises(ValueError, match="of 4 prompts 4 are longer than 0 .*: give a larger one"):
        dataset(examples, longest=0, skip_long=True)


def test_parts_have_whole_prompts(gpt2: Built, write) -> None:
    records = [{"prompt": f"{n % 8}", "answer": n} for n in range(24)]
    examples = opened(gpt2, write(records))
    recipe = PromptRecipe(100, 5, by_prompt=True)
    parts = [
        {data[n].prompt.text for n in range(len(data))}
        for name, units in (("train", range(15)), ("valid", range(15, 24)))
        for data in [recipe.build(examples, units, 1, name, IndexCache(None))]
    ]
    assert parts[0] | parts[1] == set("01234567") and not parts[0] & parts[1]
    shares = Counter(examples.prompt_hashes.tolist()).values()
    assert set(shares) == {3}


def test_damaged_caches_are_named(gpt2: Built, write) -> None:
    examples = opened(gpt2, write([{"prompt": "a"}, {"prompt": "b"}]))
    arrays = dict(examples._index.items())
    for name in ("tokens", "records", "prompt_hashes"):
        broken = StoredArrays(arrays | {name: arrays[name][:-1]})
        with pytest.raises(ValueError, match="cached examples of .*data.jsonl are damaged: delete"):
            dataset(PromptExamples(examples.prefix, broken))
