"""Fields of messages: weights, calls, tools and reasoning, against transformers' template."""

import copy
import json

import numpy as np
import pytest

from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import parse_example
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig

from .conftest import CHATML, MARKED, Built

LIKE_QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- if ns.open and message.role == "user" %}
{%- set ns.open = false %}{%- set ns.last_query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>assistant\\n' }}
{%- set content = message.content %}{%- set thought = '' %}
{%- if message.reasoning_content is defined and message.reasoning_content is not none %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in message.content %}{%- set content = message.content.split('</think>')[-1] %}
{%- endif %}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
"""Qwen3's template (Apache 2.0), shortened: the forms of tools, calls, reasoning and results."""
LIKE_DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "<|im_start|>{{ m['tool_calls'][0]['function']['name'] }}<|im_end|>"
    "{% else %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
"""Writes calls only where the content is null."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Mars"}}}
USER = {"role": "user", "content": "Is it warm?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "content": "cold"}
ANSWER = {"role": "assistant", "content": "No."}
THOUGHT = ANSWER | {"reasoning_content": "Mars is far."}


@pytest.fixture(scope="module")
def qwen3(with_template) -> Built:
    return with_template(LIKE_QWEN3)


ENCODERS: dict[object, ExampleEncoder] = {}


def encode(record: dict, built: Built, **flags):
    config = InstructionConfig(**flags)
    key = (id(built), config)
    encoder = ENCODERS.setdefault(key, ExampleEncoder(config, built.tokenizer, built.config))
    example = parse_example(record, RecordColumns.of(config))
    ((tokens, counted),) = encoder([("x.jsonl, line 1", example)])
    return tokens, counted


def answers(built: Built, tokens, counted) -> str:
    return built.tokenizer.detokenize(tokens[counted].tolist())


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, THOUGHT]},
        {"messages": [USER, CALLING], "tools": TOOLS},
        {"messages": [USER, CALLING, RESULT, ANSWER], "tools": TOOLS},
        {"messages": [USER, CALLING, RESULT, THOUGHT], "tools": TOOLS},
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"messages": [{"role": "system", "content": "s"}, USER, THOUGHT], "tools": TOOLS},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_tokens_are_those_of_apply_chat_template(record: dict, qwen3: Built) -> None:
    theirs = qwen3.tokenizer.transformers_tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        **record.get("chat_template_kwargs", {}),
        return_dict=True,
    )["input_ids"]
    tokens, counted = encode(record, qwen3)
    assert tokens.tolist() == theirs
    assert answers(qwen3, tokens, counted).endswith("<|im_end|>")


def spelt_otherwise() -> list:
    """The same conversation: a call by null, missing and listed content, arguments as text."""
    arguments = {"name": "weather", "arguments": json.dumps({"city": "Mars"})}
    as_text = {"type": "function", "function": arguments}
    without = {key: value for key, value in CALLING.items() if key != "content"}
    without_calls = {"role": "assistant", "content": None}
    thought = {key: value for key, value in THOUGHT.items() if key != "reasoning_content"}
    return [
        ([USER, CALLING], [USER, CALLING | {"content": None}]),
        ([USER, CALLING], [USER, without]),
        ([USER, CALLING], [USER, CALLING | {"content": []}]),
        ([USER, CALLING], [USER, CALLING | {"tool_calls": [as_text]}]),
        ([USER, CALLING], [USER, CALLING | {"tool_calls": json.dumps([CALL])}]),
        ([USER, CALLING], [USER, without_calls | {"function_call": arguments}]),
        ([USER, CALLING], [USER, {"from": "function_call", "value": json.dumps(arguments)}]),
        ([USER, CALLING], [USER, {"from": "function_call", "value": json.dumps([CALL])}]),
        ([USER, RESULT, ANSWER], [USER, {"from": "function_response", "value": "cold"}, ANSWER]),
        ([USER, ANSWER], [USER | {"role": "human"}, {"from": "chatgpt", "value": "No."}]),
        ([USER, THOUGHT], [USER, thought | {"reasoning": "Mars is far."}]),
        ([USER, THOUGHT], [USER, thought | {"thinking": "Mars is far."}]),
        ([USER, ANSWER], [USER, ANSWER | {"content": [{"type": "text", "text": "No."}]}]),
        ([USER, ANSWER], [USER, ANSWER | {"weight": 1, "name": None, "tool_calls": None}]),
        ([USER, ANSWER], [USER | {"weight": 0.0}, ANSWER | {"train": True}]),
    ]


@pytest.mark.parametrize(("one", "other"), spelt_otherwise())
def test_spellings_of_one_conversation(one: list, other: list, qwen3: Built) -> None:
    for record in ({}, {"tools": TOOLS}):
        first, second = (
            encode(record | {"messages": copy.deepcopy(each)}, qwen3) for each in (one, other)
        )
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
    as_json = encode({"messages": one, "tools": json.dumps(TOOLS)}, qwen3)
    np.testing.assert_array_equal(as_json[0], first[0])


def test_a_template_that_writes_calls_by_null_gets_null(with_template) -> None:
    built = with_template(LIKE_DEEPSEEK)
    for content in (None, ""):
        tokens, counted = encode({"messages": [USER, CALLING | {"content": content}]}, built)
        assert answers(built, tokens, counted) == "<|im_start|>weather<|im_end|>"


WEIGHTS = [
    (CHATML, "weight", 0),
    (MARKED, "weight", 0),
    (None, "weight", 0.0),
    (None, "train", False),
    (None, "training", False),
    (None, "loss", False),
]


@pytest.mark.parametrize(("template", "key", "value"), WEIGHTS)
def test_an_answer_of_weight_0_does_not_count(
    template: str | None, key: str, value: object, with_template, gpt2: Built
) -> None:
    built = gpt2 if template is None else with_template(template)
    first = {"role": "assistant", "content": "Earth"}
    last = {"role": "assistant", "content": "Mars"}
    turns = [USER, first, USER, last]
    whole, counted = encode({"messages": turns}, built)
    tokens, without_first = encode({"messages": [USER, first | {key: value}, USER, last]}, built)
    _, without_last = encode({"messages": [USER, first, USER, last | {key: value}]}, built)
    np.testing.assert_array_equal(tokens, whole)
    end = "<|im_end|>" if template else "<|endoftext|>"
    assert answers(built, whole, counted) == f"Earth{end}Mars{end}"
    assert answers(built, whole, without_first) == f"Mars{end}"
    assert answers(built, whole, without_last) == f"Earth{end}"
    _, none = encode({"messages": [USER, first, USER, last | {key: value}]}, built, loss_on="last")
    assert not none.any()
    with pytest.raises(ValueError, match=r"--loss-on everything, and a message"):
        encode({"messages": [USER, last | {key: value}]}, built, loss_on="everything")


REFUSED = [
    ([USER, CALLING], {}, CHATML, 'the chat template does not write "tool_calls"'),
    ([USER, ANSWER], {"tools": TOOLS}, CHATML, 'the chat template does not write "tools"'),
    ([USER, THOUGHT], {}, CHATML, '"reasoning_content".*--ignore-columns reasoning_content'),
    ([USER | {"name": "Ann"}, ANSWER], {}, CHATML, '"name".*--ignore-columns name'),
    ([USER, ANSWER], {"chat_template_kwargs": {"depth": 1}}, CHATML,
     '"depth".*--ignore-columns chat_template_kwargs'),
    ([USER, CALLING], {}, None, '--prompt-format alpaca does not write "tool_calls"'),
    ([USER, ANSWER], {"tools": TOOLS}, None, '--prompt-format alpaca does not write "tools"'),
    ([USER, THOUGHT], {}, None, '"reasoning_content"'),
    ([USER | {"weight": 1}, ANSWER], {}, CHATML, '"weight" is 1 in a message of the role "user"'),
    ([USER, ANSWER | {"weight": 0.5}], {}, CHATML, '"weight" of a message must be 0 or 1'),
    ([USER, ANSWER | {"function_call": {"name": "f"}}], {}, CHATML, 'not write "tool_calls"'),
    ([USER, CALLING | {"function_call": {"name": "g"}}], {}, CHATML, 'the key "function_call"'),
    ([USER, ANSWER | {"content": None}], {}, CHATML, 'neither "content" nor "tool_calls"'),
    ([USER, {"from": "function_call", "value": ""}], {}, CHATML, '"tool_calls" must be a list'),
    ([USER, ANSWER | {"refusal": "I won't."}], {}, CHATML, 'message 2: the key "refusal"'),
    ([USER | {"content": [{"type": "image"}]}, ANSWER], {}, CHATML, "not a text"),
    ([USER, ANSWER], {"tools": {"name": "f"}}, CHATML, '"tools" must be a list'),
    ([USER, ANSWER], {"tools": "f(x)"}, CHATML, '"tools" is a string that is not JSON'),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "more", "template", "message"), REFUSED)
def test_what_would_be_left_out_is_refused(
    messages: list, more: dict, template: str | None, message: str, with_template, gpt2: Built
) -> None:
    built = gpt2 if template is None else with_template(template)
    with pytest.raises(ValueError, match=message):
        encode({"messages": messages} | more, built)


@pytest.mark.parametrize("content", [None, ""])
def test_an_answer_whose_calls_are_left_out_does_not_count(content, with_template) -> None:
    """It has no text, and the model must not learn to answer nothing."""
    built = with_template(CHATML)
    role = {"role": "assistant", "content": content}
    for calling in (
        role | {"tool_calls": [CALL]},
        role | {"function_call": CALL["function"]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
    ):
        record = {"messages": [USER, calling, RESULT | {"name": None}, ANSWER]}
        with pytest.raises(ValueError, match='"tool_calls".*--ignore-columns tool_calls'):
            encode(record, built)
        tokens, counted = encode(record, built, ignore_columns=("tool_calls",))
        assert answers(built, tokens, counted) == "No.<|im_end|>"


def test_ignored_keys_are_left_out(with_template) -> None:
    built = with_template(CHATML)
    plain = encode({"messages": [USER, ANSWER]}, built)[0]
    flags = {"ignore_columns": ("reasoning_content", "tools")}
    found = encode({"messages": [USER, THOUGHT], "tools": TOOLS}, built, **flags)[0]
    np.testing.assert_array_equal(found, plain)
