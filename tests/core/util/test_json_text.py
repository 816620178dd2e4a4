"""JSON of others: a value, or one line that names the file."""

import contextlib
import gc
import json
import time

import pytest

from megatron.util.json_text import MAX_DEPTH, MAX_DIGITS, parse_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        (b" \n", "it is empty"),
        ("{", "line 1, column 2"),
        ('{"a": "b', "Unterminated string"),
        ('{"a": 1,}', "line 1"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"\x80\x05K\x01.", "byte 0 is not UTF-8"),
        ("[" * 200_000, f"more than {MAX_DEPTH} levels"),
        ("[" * 200_000 + "]" * 200_000, f"more than {MAX_DEPTH} levels"),
        ('{"a":' * 150 + "1" + "}" * 150, f"more than {MAX_DEPTH} levels"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        ("[" + "1" * 100_000 + "]", "an integer of 100,000 digits"),
        ("[-" + "1" * 400 + "]", "an integer of 400 digits"),
        ('{"scale": NaN}', "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("[1e999]", "the number 1e999 is too large"),
        ('{"a": {"lr": 1, "lr": 2}}', 'the key "lr" occurs twice'),
        ('{"a": "\\ud800"}', "lone surrogate"),
    ],
)
def test_what_is_refused_names_the_file(text, reason):
    with pytest.raises(ValueError, match=r"^x/config\.json is not valid JSON: ") as caught:
        parse_json(text, "x/config.json")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        None,
        "é\N{GRINNING FACE}",
        {"model_max_length": 10**30, "eps": 1e-5, "list": [[1], [2.5]]},
        [10 ** (MAX_DIGITS - 1), -(10 ** (MAX_DIGITS - 1))],
        [{}] * 1000,
        "[" * 1000,
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_ordinary_files_are_read(value, lenient):
    for text in (json.dumps(value), json.dumps(value).encode()):
        assert parse_json(text, "a", lenient=lenient) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value).encode(), "a") == value


def test_deep_but_not_too_deep():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text, "a") == json.loads(text)


def test_what_the_files_of_other_programs_have():
    text = '{"time_step_limit": [0.0, Infinity], "a": 1, "a": 2, "half": "\\ud83d"}'
    assert parse_json(text, "config.json", lenient=True) == json.loads(text)
    for refused in ("[" * 101 + "]" * 101, "1" * 400, b"\xff", "[" * 100_000, ""):
        with pytest.raises(ValueError, match="^config.json is not valid JSON"):
            parse_json(refused, "config.json", lenient=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "' + ("1" * 300 + " ") * 3300 + '"}',
        "[" + ",".join(["[]"] * 330_000) + "]",
        "{" + ",".join(f'"{i}": 0' for i in range(80_000)) + ', "0": 1}',
        '["' + '\\"' * 500_000 + '"]',
        '"\\ud800' * 140_000,
    ],
)
def test_a_megabyte_of_the_worst_takes_less_than_a_second(text):
    gc.disable()  # a collection looks at all that other tests have left in this process
    try:
        start = time.process_time()
        with contextlib.suppress(ValueError):
            parse_json(text, "a")
        assert time.process_time() - start < 1
    finally:
        gc.enable()
