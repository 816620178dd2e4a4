"""Layouts of instruction files, by hand."""

from pathlib import Path

import pytest

from megatron.features.instruction.conversations import Example, Turn, parse_example, read_examples


def user(text: str, context: str = "") -> Turn:
    return Turn("user", text, context)


def answer(text: str) -> Turn:
    return Turn("assistant", text)


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"instruction": "a", "output": "b"}, [user("a"), answer("b")]),
        ({"instruction": "a", "input": "", "output": "b"}, [user("a"), answer("b")]),
        ({"instruction": "a", "input": "c", "output": "b"}, [user("a", "c"), answer("b")]),
        ({"instruction": "a", "response": "b"}, [user("a"), answer("b")]),
        (
            {"system": "s", "history": [["q", "r"]], "instruction": "a", "output": "b"},
            [Turn("system", "s"), user("q"), answer("r"), user("a"), answer("b")],
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [user("a"), answer("b")],
        ),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                    {"from": "observation", "value": "t"},
                    {"from": "gpt", "value": "c"},
                    {"from": "human", "value": "without an answer"},
                ],
            },
            [Turn("system", "s"), user("a"), answer("b"), Turn("tool", "t"), answer("c")],
        ),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            [user("a"), answer("b")],
        ),
        (
            {
                "input": [{"role": "User", "content": "a"}],
                "output": '[{"role": "Assistant", "content": "b"}]',
            },
            [user("a"), answer("b")],
        ),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
            },
            [user("a"), answer("b")],
        ),
        (
            {"history": '[["q", "r"]]', "instruction": "a", "output": "b"},
            [user("q"), answer("r"), user("a"), answer("b")],
        ),
        ({"messages": ["a", "b"]}, [user("a"), answer("b")]),
        ({"messages": [{"human": "a", "assistant": "b"}]}, [user("a"), answer("b")]),
        (
            {"instruction": "a", "output": '[{"from": "Rome", "to": "Paris"}]'},
            [user("a"), answer('[{"from": "Rome", "to": "Paris"}]')],
        ),
    ],
)
def test_layouts(record: dict, turns: list[Turn]) -> None:
    assert parse_example(record) == Example(tuple(turns))


@pytest.mark.parametrize("key", ["completion", "response"])
def test_pairs(key: str) -> None:
    example = parse_example({"prompt": "1 + 1 =", key: " 2"})
    assert example == Example((user("1 + 1 ="), answer(" 2")), is_pair=True)


BAD = [
    ("[1]", "a record must be a JSON object"),
    ('{"text": "a"}', r'unknown layout \(its keys: "text"\)'),
    ('{"instruction": "a", "chosen": "b", "rejected": "c"}', "--preference dpo"),
    ('{"messages": "a"}', '"messages" must be a list'),
    ('{"messages": ["a"]}', "there is no answer"),
    ('{"messages": [["a", "b"]]}', '"messages" must be a list of objects'),
    (
        '{"instruction": "a", "output": ["b", "c"]}',
        '"output" must be a list of objects.*not of "b"',
    ),
    ('{"prompt": ["a", "b"], "completion": "c"}', '"prompt" must be a list of objects'),
    ('{"messages": []}', "there is no answer"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "there is no answer"),
    ('{"messages": [{"role": "assistant", "content": 1}]}', '"content" must be a string'),
    ('{"messages": [{"content": "a"}]}', 'no key "role"'),
    ('{"conversations": [{"from": "me", "value": "a"}]}', 'from "me"; expected one of human'),
    ('{"instruction": "a"}', 'no key "output"'),
    ('{"instruction": "a", "output": 1}', '"output" must be a string, not 1'),
    ('{"instruction": "a", "input": 1, "output": "b"}', '"input" must be a string'),
    (
        '{"instruction": "a", "history": [["q"]], "output": "b"}',
        '"history" must be a list of pairs',
    ),
    ('{"prompt": "a"}', 'no key "completion"'),
    ('{"prompt": "a", ', "not JSON"),
    ('{"prompt": ' + "[" * 1000 + "]" * 1000 + "}", "nested"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_malformed_records_are_named(line: str, message: str, tmp_path: Path) -> None:
    good = '{"prompt": "a", "completion": "b"}'
    lines = tmp_path / "data.jsonl"
    lines.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: .*{message}"):
        list(read_examples(str(lines)))
    array = tmp_path / "data.json"
    array.write_text(f"\ufeff [{good},\n{line}]")
    # A parser that meets one that is not JSON, or cannot follow it, has no number of records.
    place = r"data\.json, (record 2|item 2 of the array): "
    with pytest.raises(ValueError, match=rf"{place}.*{message}"):
        list(read_examples(str(array)))


def test_array_and_lines_are_the_same(write) -> None:
    records = [{"prompt": str(n), "completion": "x"} for n in range(5)]
    lines, array = read_examples(write(records)), read_examples(write(records, "data.json"))
    pairs = list(zip(lines, array, strict=True))
    assert len(pairs) == 5
    assert all(of_line == of_array for (_, of_line), (_, of_array) in pairs)


@pytest.mark.realdata
def test_public_files(realdata: Path) -> None:
    alpaca = list(read_examples(str(realdata / "sft" / "alpaca_en_demo.json")))
    assert len(alpaca) == 999
    assert alpaca[0][1].turns[0].content == "Describe a process of making crepes."
    ((_, chat),) = read_examples(str(realdata / "sft" / "chat_tiny.json"))
    assert [turn.role for turn in chat.turns] == ["system", *["user", "assistant"] * 2]
