"""Layouts of preference files, by hand and against trl."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.features.instruction.conversations import Turn
from megatron.features.preference.records import Preference, parse_preference, read_preferences


def user(text: str, context: str = "") -> Turn:
    return Turn("user", text, context)


def answer(text: str) -> Turn:
    return Turn("assistant", text)


def said(*texts: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def answered(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


SYSTEM = Turn("system", "s")
PAIRS = [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, [user("a")], True),
    ({"prompt": said("a"), "chosen": answered("b"), "rejected": answered("c")}, [user("a")], False),
    ({"prompt": said("a"), "chosen": "b", "rejected": "c"}, [user("a")], False),
    ({"chosen": said("a", "b"), "rejected": said("a", "c")}, [user("a")], False),
    # UltraFeedback: the messages repeat the prompt.
    ({"prompt": "a", "chosen": said("a", "b"), "rejected": said("a", "c")}, [user("a")], False),
    ({"prompt": "a", "chosen": answered("b"), "rejected": answered("c")}, [user("a")], False),
    (
        {"chosen": said("a", "x", "y", "b"), "rejected": said("a", "x", "y", "c")},
        [user("a"), answer("x"), user("y")],
        False,
    ),
    (
        {"system": "s", "chosen": said("a", "b"), "rejected": said("a", "c")},
        [SYSTEM, user("a")],
        False,
    ),
    # LLaMA-Factory: alpaca, older alpaca, and ShareGPT.
    (
        {"instruction": "a", "input": "i", "chosen": "b", "rejected": "c"},
        [user("a", "i")],
        False,
    ),
    (
        {"system": "s", "history": [["q", "r"]], "instruction": "a", "output": ["b", "c"]},
        [SYSTEM, user("q"), answer("r"), user("a")],
        False,
    ),
    (
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
        [user("a")],
        False,
    ),
    (
        {"messages": said("a"), "chosen": "b", "rejected": {"role": "assistant", "content": "c"}},
        [user("a")],
        False,
    ),
]


@pytest.mark.parametrize(("record", "prompt", "is_text"), PAIRS)
def test_pairs(record: dict, prompt: list[Turn], is_text: bool) -> None:
    both = ((answer("b"),), (answer("c"),))
    assert parse_preference(record) == Preference(tuple(prompt), both, is_text)


JUDGED = [
    ({"prompt": "a", "completion": "b", "label": True}, [user("a")], True),
    ({"prompt": said("a"), "completion": answered("b"), "label": True}, [user("a")], False),
    ({"instruction": "a", "input": "i", "output": "b", "kto_tag": True}, [user("a", "i")], False),
    ({"messages": said("a", "b"), "label": True}, [user("a")], False),
    (
        {
            "system": "s",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            "kto_tag": True,
        },
        [SYSTEM, user("a")],
        False,
    ),
]


@pytest.mark.parametrize(("record", "prompt", "is_text"), JUDGED)
def test_judged_answers(record: dict, prompt: list[Turn], is_text: bool) -> None:
    expected = Preference(tuple(prompt), ((answer("b"),),), is_text, good=True)
    assert parse_preference(record) == expected
    for key in {"label", "kto_tag"} & record.keys():
        assert parse_preference(record | {key: False}).good is False


def test_a_pair_is_two_judged_answers() -> None:
    pair = parse_preference({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2})
    assert pair.margin == 2 and [(p.answers, p.good) for p in pair.judged()] == [
        (((answer("b"),),), True),
        (((answer("c"),),), False),
    ]
    assert all(p.prompt == pair.prompt and p.is_text and p.margin is None for p in pair.judged())
    one = parse_preference({"prompt": "a", "completion": "b", "label": False})
    assert list(one.judged()) == [one]


BAD = [
    ("[1]", "a record must be a JSON object"),
    ('{"text": "a"}', r'unknown layout \(its keys: "text"\); a record has "chosen"'),
    ('{"instruction": "a", "output": "b"}', "unknown layout.*without --preference"),
    ('{"prompt": "a", "chosen": "b"}', 'no key "rejected"'),
    ('{"prompt": 1, "chosen": "b", "rejected": "c"}', '"prompt" must be a string'),
    ('{"prompt": "a", "chosen": 1, "rejected": "c"}', '"chosen" must be a list of messages'),
    ('{"chosen": "ab", "rejected": "xb"}', "share no beginning"),
    ('{"chosen": "", "rejected": ""}', "share no beginning"),
    (
        '{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": '
        '"b"}]}',
        "so that there is no prompt",
    ),
    (
        '{"prompt": "a", "chosen": [{"role": "user", "content": "a"}, {"role": "user", "content": '
        '"x"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
        '"x"}]}',
        'no message of the role "assistant"',
    ),
    ('{"instruction": "a", "output": ["b"]}', '"output" must be a list of the better and the'),
    ('{"prompt": "a", "completion": "b", "label": 2}', '"label" must be true, false, 1 or 0, not'),
    ('{"completion": "b", "label": true}', 'no "prompt" before "completion"'),
    ('{"prompt": "a", "label": true}', "there is no answer to judge"),
    ('{"messages": [], "label": true}', "there is no answer to judge"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}', '"margin" must be a number'),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": true}', '"margin" must be a num'),
    ('{"prompt": "a", "chosen": ["b", "d"], "rejected": "c"}', '"chosen" must be a list of obj'),
    ('{"prompt": "a", ', "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_malformed_records_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: .*{message}"):
        list(read_preferences(str(path)))


def test_prompt_inside_of_texts() -> None:
    """The example of trl's ``extract_prompt``."""
    found = parse_preference({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    answers = ((answer(" blue."),), (answer(" green."),))
    assert found == Preference((user("The sky is"),), answers, is_text=True)


def of_trl(record: dict) -> dict:
    data_utils = pytest.importorskip("trl.data_utils", reason="trl says where a prompt ends")
    return data_utils.extract_prompt(record)


TEXT = st.text(alphabet="ab ", min_size=1, max_size=8)


@pytest.mark.proof
@settings(deadline=None)  # the first import of trl takes seconds
@given(TEXT, TEXT, TEXT)
def test_prompts_inside_of_texts_against_trl(prompt: str, chosen: str, rejected: str) -> None:
    record = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    try:
        found = parse_preference(record)
    except ValueError:
        # No prompt is left before the answers; trl then counts from the end of the text.
        assert len(of_trl(record)["prompt"]) < 1 or record["chosen"][0] == " "
        return
    theirs = of_trl(record)
    assert found.prompt == (user(theirs["prompt"]),)
    assert found.answers == ((answer(theirs["chosen"]),), (answer(theirs["rejected"]),))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [(["a", "b"], ["a", "c"]), (["a", "b", "c", "d"], ["a", "b", "c", "e"]), (["a", "b"],) * 2],
)
def test_prompts_inside_of_messages_against_trl(chosen: list, rejected: list) -> None:
    record = {"chosen": said(*chosen), "rejected": said(*rejected)}
    found, theirs = parse_preference(record), of_trl(record)
    for turns, messages in (
        (found.prompt, theirs["prompt"]),
        (found.answers[0], theirs["chosen"]),
        (found.answers[1], theirs["rejected"]),
    ):
        assert [{"role": turn.role, "content": turn.content} for turn in turns] == messages
