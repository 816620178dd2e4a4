"""Verifiers: by hand, and against trl's functions of the same names."""

import importlib.util
from fractions import Fraction

import pytest

from megatron.apps.reinforcement.rewards import verifiers

HAS_JSONSCHEMA = importlib.util.find_spec("jsonschema") is not None
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}, "name": {"type": "string"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5), ("The answer is 42.", 42), ("-3", -3), ("1,234,567 in all", 1234567),
        ("from 3 to 4", 4), ("2.50", Fraction(5, 2)), (".5", Fraction(1, 2)), ("1e3", 1000.0),
        (r"\boxed{7} or 8", 7), (r"\boxed{1} then \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"-\frac{3}{4}", Fraction(-3, 4)), ("3/4", Fraction(3, 4)), ("1/0", 0),
        (r"\boxed{x} = 9", 9), (r"\boxed{\text{a}{b}} 6", 6), ("#### 18", 18),
        ("none", None), ("", None), (r"\boxed{", None), ("1" * 500, None), ("x" * 10**6, None),
        ("(" * 10**5 + "3", 3),
    ],
)  # fmt: skip
def test_numbers_of_texts(text: str, number) -> None:
    found = verifiers.last_number(text)
    assert found is not None if len(text) == 500 else found == number


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("5", 5, 1.0), ("5", "5", 1.0), ("5", 5.0, 1.0), ("It is 5", "#### 5", 1.0), ("6", 5, 0.0),
        ("", 5, 0.0), ("0.3333333", "1/3", 1.0), ("0.3334", "1/3", 0.0), ("3", None, None),
        ("3", "no number", None), ("10000001", 10000000, 0.0), ("1.0000000001", 1, 1.0),
    ],
)  # fmt: skip
def test_equal_numbers(text: str, answer, reward) -> None:
    assert verifiers.number([text], [answer]) == [reward]
    message = [{"role": "assistant", "content": text}]
    assert verifiers.number([message], [answer]) == [reward]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (" yes\n", "yes", 1.0), ("Yes", "yes", 0.0), ("b", ["a", "b"], 1.0), ("3", 3, 1.0),
        (r"so \boxed{x+1}", "x+1", 1.0), ("a", None, None), ("", "a", 0.0),
    ],
)  # fmt: skip
def test_exact_matches(text: str, answer, reward) -> None:
    assert verifiers.exact([text], [answer]) == [reward]


@pytest.mark.skipif(not HAS_JSONSCHEMA, reason="needs jsonschema")
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "a", "age": 3}', 1.0), ('{"age": 3}', 0.0), ('{"name": "a", "age": -1}', 0.0),
        ("no", 0.0), ("", 0.0), ('```json\n{"name": "a"}\n```', 1.0), ('{"name": NaN}', 0.0),
        ("[" * 10**5, 0.0), ('{"name": "a"} and more', 0.0),
    ],
)  # fmt: skip
def test_json_agrees_with_its_schema(text: str, reward: float) -> None:
    assert verifiers.json_schema([text], [SCHEMA]) == [reward]
    assert verifiers.json_schema([text], [None]) == [None]


def test_tests_and_code_of_texts() -> None:
    assert verifiers.code_of("Use:\n```python\nx = 1\n```\nthen\n```py\ny = 2\n```") == "y = 2\n"
    assert verifiers.code_of("x = 1") == "x = 1"
    assert verifiers.tests_of("assert f(1)") == ["assert f(1)"]
    assert verifiers.tests_of('["assert 1", {"input": "1", "output": "2"}]')[1]["output"] == "2"
    with pytest.raises(ValueError, match="tests must be statements, or objects"):
        verifiers.tests_of([{"input": 1}])


@pytest.mark.proof
def test_trls_functions_against_trl() -> None:
    from trl import rewards

    texts = [
        "<think>a</think>b", "<think>a</think>", "x<think>a</think>", "<think>a<think></think>",
        "<think>a", "", "<think>\na\n</think>\nb\nc",
    ]  # fmt: skip
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    own = verifiers.think_format_reward(messages)
    assert own == rewards.think_format_reward(messages) == verifiers.think_format_reward(texts)
    ids = [[1, 2, 3, 4], [5] * 4, [], [1, 2], [1, 2, 3, 1, 2, 3, 1, 2, 3]]
    expected = rewards.get_repetition_penalty_reward()(ids)
    assert verifiers.repetition_penalty_reward(ids) == pytest.approx(expected)
