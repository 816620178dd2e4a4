"""Rewards that a program can verify. They are functions with trl's arguments, run in confined
processes, that return one reward for each completion, or None if its record has nothing to compare
with.

Code in completions is run by the keeper itself. This module only extracts code and tests.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Completions = Sequence[Any]
"""Completions as strings, or as lists of messages."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]{0,80}(?:\.\d{0,80})?|\.\d{1,80})(?:[eE][-+]?\d{1,3})?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d{1,80})\}\{(\d{1,80})\}|([-+]?\d{1,80})/(\d{1,80})")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_FENCED = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_LONGEST_JSON = 1 << 20


def text_of(completion: Any) -> str:
    """Return the completion's text, or the text of the model's last message."""
    if isinstance(completion, str):
        return completion
    own = [m for m in completion if m.get("role", "assistant") == "assistant"]
    return str(own[-1].get("content") or "") if own else ""


def number(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""Return, for each completion, 1 if its number equals the answer's, else 0. The number is the
    one in the last \\boxed{}, or else the last number in the text. Integers must be equal; other
    numbers may have a relative difference of 1e-6."""
    return [
        None if (right := last_number(_plain(expected))) is None else _equal(text, right)
        for text, expected in zip(map(text_of, completions), answer, strict=True)
    ]


def _equal(text: str, right: Fraction | float) -> float:
    written = last_number(text)
    if written is None:
        return 0.0
    if all(isinstance(n, Fraction) and n.denominator == 1 for n in (written, right)):
        return float(written == right)
    return float(math.isclose(float(written), float(right), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE))


def last_number(text: str) -> Fraction | float | None:
    r"""Return the number in the last \\boxed{} of a text, or else the text's last number, or None
    if it has no number. Decimals and fractions are exact."""
    boxes = boxed(text)
    for part in (*boxes[-1:], text):
        fractions = [(match.end(), match) for match in _FRACTION.finditer(part)]
        numbers = [(match.end(), match) for match in _NUMBER.finditer(part)]
        ends = max((end for end, _ in (*fractions, *numbers)), default=None)
        if ends is None:
            continue
        if fractions and fractions[-1][0] >= ends - 1:
            sign, top, bottom, left, right = fractions[-1][1].groups()
            above, below = int(f"{sign}{top}" if top else left), int(bottom or right)
            if below:
                return Fraction(above, below)
        digits = numbers[-1][1].group().replace(",", "").rstrip(".")
        try:
            return Fraction(digits) if "e" not in digits.lower() else float(digits)
        except ValueError:
            continue
    return None


def boxed(text: str) -> list[str]:
    r"""Return the contents of each \\boxed{} with balanced braces."""
    contents = []
    start = text.find("\\boxed{")
    while start >= 0:
        depth, place = 1, start + len("\\boxed{")
        begin = place
        while place < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if depth:
            break
        contents.append(text[begin : place - 1])
        start = text.find("\\boxed{", place)
    return contents


def exact(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""Return 1 if a completion, or its last \\boxed{}, equals the answer or one of a list of
    answers, ignoring surrounding white space, else 0."""
    rewards: list[float | None] = []
    for text, expected in zip(map(text_of, completions), answer, strict=True):
        if expected is None:
            rewards.append(None)
            continue
        answers = expected if isinstance(expected, list) else [expected]
        right = {_plain(each).strip() for each in answers}
        rewards.append(float(not right.isdisjoint(t.strip() for t in (text, *boxed(text)[-1:]))))
    return rewards


def _plain(value: Any) -> str:
    """Convert an answer to text. Whole floats, as stored in tables, lose their decimals."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def json_schema(completions: Completions, schema: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 if a completion, or its last code block, is JSON that satisfies the record's schema
    (an object, or JSON text), else 0. Return None for a record without a schema."""
    rewards: list[float | None] = []
    for text, expected in zip(map(text_of, completions), schema, strict=True):
        if isinstance(expected, str):
            expected = json.loads(expected)
        rewards.append(None if expected is None else float(_agrees(text, expected)))
    return rewards


def _agrees(text: str, schema: Any) -> bool:
    source = _last_block(text, ("json", ""))
    if len(source) > _LONGEST_JSON:
        return False
    try:
        value = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    validators = importlib.import_module("jsonschema.validators")
    kind = validators.validator_for(schema)
    kind.check_schema(schema)
    try:
        return bool(kind(schema).is_valid(value))
    except RecursionError:
        return False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def code_of(text: str) -> str:
    """Return the last Python code block of a text, or the whole text if it has none."""
    return _last_block(text, ("python", "py", ""))


def _last_block(text: str, kinds: Sequence[str]) -> str:
    """Return the last fenced block in one of these languages, or the whole text if it has none."""
    blocks = [
        body
        for words, body in _FENCED.findall(text)
        if re.split(r"\W", words.strip(), maxsplit=1)[0].lower() in kinds
    ]
    return str(blocks[-1]) if blocks else text


def tests_of(value: Any) -> list[Any]:
    """Return a record's tests: a list of statements, or of objects with "input" and "output". The
    column may contain a single test, a list, or a list as JSON. Raises ValueError otherwise."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    tests = value if isinstance(value, list) else [value]
    for test in tests:
        if not isinstance(test, str) and not (
            isinstance(test, dict) and {"input", "output"} <= test.keys()
        ):
            raise ValueError(
                'tests must be statements, or objects with "input" and "output", not '
                f"{json.dumps(test)[:60]}"
            )
    return tests


def think_format_reward(completions: Completions, **_: Any) -> list[float]:
    """Return 1 if a completion begins with one block of <think> and </think>, as in trl 1.16, else
    0."""
    rewards = []
    for text in map(text_of, completions):
        inside = text.removeprefix("<think>")
        good = inside != text and "<think>" not in inside and "</think>" in inside
        rewards.append(float(good))
    return rewards


def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return minus the fraction of repeated token trigrams, as in trl 1.16 by default."""
    rewards = []
    for ids in completion_ids:
        triples = list(zip(ids, ids[1:], ids[2:], strict=False))
        rewards.append(len(set(triples)) / len(triples) - 1.0 if triples else 0.0)
    return rewards


def accuracy_reward(
    completions: Completions, solution: Sequence[str], **_: Any
) -> list[float | None]:
    """Call trl's function of the same name, which uses the package math-verify."""
    rewards = importlib.import_module("trl.rewards")
    messages = [[{"role": "assistant", "content": text_of(each)}] for each in completions]
    result: list[float | None] = rewards.accuracy_reward(messages, solution=list(solution))
    return result
