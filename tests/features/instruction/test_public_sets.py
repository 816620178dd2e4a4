"""Columns of widely used sets of instructions: what is read of each, or how it is refused.

The records are made up; their keys are those of the sets. trl reads "messages" and conversations
under "prompt" and "completion" only; for others the reference is the mapping that LLaMA-Factory's
dataset_info.json has, written here as turns.
"""

import json

import pytest

from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import parse_example
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig

from .conftest import MARKED, Built

Q, A, PASSAGE = "Name a planet.", "Mars.", "There are eight planets."
SYSTEM = "Be brief."


def said(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]


def spoken(*texts: str, **more: object) -> list[dict]:
    return [{"from": ("human", "gpt")[n % 2], "value": t, **more} for n, t in enumerate(texts)]


ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    f"the request.\n\n### Instruction:\n{Q}\n\n### Response:\n{A}"
)
ONE = [("user", Q), ("assistant", A)]
WITH_SYSTEM = [("system", SYSTEM), *ONE]
WITH_PASSAGE = [("user", f"{Q}\n{PASSAGE}"), ("assistant", A)]
TWO = [*ONE, ("user", "Another?"), ("assistant", "Venus.")]
FUNCTION = '[{"type": "function", "function": {"name": "f"}}]'
READ = {
    "tatsu-lab/alpaca": ({"instruction": Q, "input": "", "output": A, "text": ALPACA_TEXT}, ONE),
    "yahma/alpaca-cleaned": ({"output": A, "input": PASSAGE, "instruction": Q}, WITH_PASSAGE),
    "databricks-dolly-15k": (
        {"instruction": Q, "context": PASSAGE, "response": A, "category": "closed_qa"},
        WITH_PASSAGE,
    ),
    "OpenOrca": (
        {"id": "t0.1", "system_prompt": SYSTEM, "question": Q, "response": A}, WITH_SYSTEM
    ),
    "SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": SYSTEM, "weight": None},
                {"from": "human", "value": Q, "weight": 0.0},
                {"from": "gpt", "value": A, "weight": 1.0},
            ]
        },
        WITH_SYSTEM,
    ),
    "OpenHermes-2.5": (
        {
            "custom_instruction": False, "topic": "space", "model_name": "m", "model": None,
            "skip_prompt_formatting": True, "category": "orca", "views": 3.0, "language": "en",
            "conversations": spoken(Q, A, weight=None), "id": "1", "title": "Planets", "idx": "2",
            "hash": "9f", "avatarUrl": "", "system_prompt": None, "source": "glaive",
        },
        ONE,
    ),
    "ultrachat_200k": ({"prompt": Q, "prompt_id": "f0", "messages": said(Q, A)}, ONE),
    "no_robots": (
        {"prompt": Q, "prompt_id": "f0", "messages": said(Q, A), "category": "Open QA"}, ONE
    ),
    "tulu-v2-sft-mixture": ({"dataset": "flan", "id": "flan_1", "messages": said(Q, A)}, ONE),
    "tulu-3-sft-mixture": ({"id": "1", "messages": said(Q, A), "source": "ai2"}, ONE),
    "Capybara": (
        {
            "source": "Airoboros",
            "conversation": [{"input": Q, "output": A}, {"input": "Another?", "output": "Venus."}],
        },
        TWO,
    ),
    "trl-lib/Capybara": ({"source": "x", "messages": said(Q, A), "num_turns": 1}, ONE),
    "lima": ({"conversations": [Q, A], "source": "stackexchange"}, ONE),
    "gsm8k": ({"question": Q, "answer": A}, ONE),
    "MetaMathQA": (
        {"type": "GSM_Rephrased", "query": Q, "original_question": "A planet?", "response": A}, ONE
    ),
    "CodeAlpaca-20k": ({"instruction": Q, "input": "", "output": A}, ONE),
    "sahil2801/CodeAlpaca": ({"prompt": Q, "completion": A}, ONE),
    "evol_instruct_70k": ({"instruction": Q, "output": A}, ONE),
    "evol_instruct_V2_196k": ({"idx": "a1", "conversations": spoken(Q, A)}, ONE),
    "ShareGPT_Vicuna": ({"id": "Qa_0", "conversations": spoken(Q, A)}, ONE),
    "Magpie-Pro": (
        {
            "uuid": "a", "instruction": Q, "response": A, "conversations": spoken(Q, A),
            "gen_input_configs": {"temperature": 1.0}, "gen_response_configs": {"top_p": 1.0},
            "intent": "The user wants a fact.", "knowledge": "Astronomy.", "difficulty": "easy",
            "difficulty_generator": "m", "input_quality": "good", "quality_explanation": "Clear.",
            "quality_generator": "m", "task_category": "Information seeking", "model": "m",
            "other_task_category": ["Education"], "task_category_generator": "m", "language": "EN",
            "llama_guard_2": "safe", "reward_model": "r", "instruct_reward": 0.1, "repeat_count": 0,
            "min_neighbor_distance": 0.2, "min_similar_uuid": "b", "instruction_length": 14,
            "response_length": 5, "pre_query_template": "<|user|>",
        },
        ONE,
    ),
    "smoltalk": ({"messages": said(Q, A), "source": "smol-magpie"}, ONE),
    "smoltalk2": (
        {
            "messages": said(Q, A), "source": "x",
            "chat_template_kwargs": {"custom_instructions": "", "python_tools": []},
        },
        ONE,
    ),
    "hermes-function-calling-v1": (
        {
            "id": "1", "category": "IoT", "subcategory": "s", "task": "Lights", "tools": FUNCTION,
            "conversations": [{"from": "system", "value": SYSTEM}, *spoken(Q, A)],
        },
        WITH_SYSTEM,
    ),
    "glaive-code-assistant": ({"question": Q, "answer": A}, ONE),
    "HelpSteer": (
        {
            "prompt": Q, "response": A, "helpfulness": 4, "correctness": 4, "coherence": 4,
            "complexity": 1, "verbosity": 1,
        },
        ONE,
    ),
    "lmsys-chat-1m": (
        {
            "conversation_id": "c", "model": "vicuna", "conversation": said(Q, A), "turn": 1,
            "language": "English", "openai_moderation": [{"flagged": False}], "redacted": False,
        },
        ONE,
    ),
    "NuminaMath-CoT": (
        {"source": "amc", "problem": Q, "solution": A, "messages": said(Q, A)}, ONE
    ),
    "OpenThoughts": (
        {
            "system": SYSTEM,
            "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": A}],
        },
        WITH_SYSTEM,
    ),
    "glaive_toolcall_en (LLaMA-Factory)": (
        {
            "conversations": [
                {"from": "human", "value": Q},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": A},
            ],
            "tools": FUNCTION,
        },
        [ONE[0], ("assistant", ""), ("tool", "1"), ONE[1]],
    ),
    "Llama-Nemotron": (
        {
            "input": said(Q), "output": A, "category": "math", "license": "cc", "version": "v1",
            "generator": "m", "system_prompt": SYSTEM,
        },
        WITH_SYSTEM,
    ),
    "moss": ({"conversation_id": 1, "conversation": [{"human": Q, "assistant": A}]}, ONE),
    "to_csv with an index": ({"": "0", "instruction": Q, "output": A}, ONE),
    "self-cognition (LLaMA-Factory)": (
        {"system": SYSTEM, "history": [[Q, A]], "instruction": "Another?", "output": "Venus."},
        [WITH_SYSTEM[0], *TWO],
    ),
}  # fmt: skip
REFUSED = {
    "oasst1": (
        {"message_id": "1", "parent_id": None, "text": Q, "role": "prompter", "lang": "en"},
        'unknown layout .*"text", "role".*--messages-column',
    ),
    "glaive-function-calling-v2": (
        {"system": SYSTEM, "chat": "USER: ..."}, 'unknown layout .*"system", "chat"'
    ),
    "xlam-function-calling-60k": (
        {"id": 1, "query": Q, "answers": "[]", "tools": FUNCTION}, 'no key "output".*--response-col'
    ),
    "SHP": (
        {"post_id": "p", "domain": "d", "history": Q, "human_ref_A": A, "human_ref_B": "x",
         "labels": 1, "score_A": 2},
        'unknown layout .*"human_ref_A"',
    ),
    "OpenMathInstruct-2": (
        {"problem": Q, "generated_solution": A, "expected_answer": "4", "problem_source": "x"},
        'unknown layout .*"problem", "generated_solution".*--context-column and --resp',
    ),
}  # fmt: skip


def turns(record: dict, **flags: object) -> list[tuple[str, str]]:
    columns = RecordColumns.of(InstructionConfig(**flags))
    return [(turn.role, turn.text) for turn in parse_example(record, columns).turns]


@pytest.mark.parametrize("name", READ)
def test_sets_that_are_read(name: str) -> None:
    record, expected = READ[name]
    assert turns(record) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_sets_that_are_refused(name: str) -> None:
    record, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        turns(record)


@pytest.mark.parametrize("name", READ)
def test_no_set_may_have_a_further_key(name: str) -> None:
    with pytest.raises(ValueError, match='the key "evidence" .*--ignore-columns evidence'):
        turns(READ[name][0] | {"evidence": "The moon is made of rock."})
    assert turns(READ[name][0] | {"evidence": "x"}, ignore_columns=("evidence",)) == READ[name][1]


def test_columns_by_flags() -> None:
    record = REFUSED["OpenMathInstruct-2"][0]
    flags = {"prompt_column": "problem", "response_column": "generated_solution"}
    with pytest.raises(ValueError, match='the key "expected_answer"'):
        turns(record, **flags)
    two = 'the keys "expected_answer" .*, "level" .* are not known .*columns expected_answer level;'
    with pytest.raises(ValueError, match=two):
        turns(record | {"level": 1}, **flags)
    ignored = ("expected_answer", "problem_source")
    assert turns(record, **flags, ignore_columns=ignored) == ONE
    with pytest.raises(ValueError, match=r'--prompt-column task: no such column .*"problem"'):
        turns(record, prompt_column="task")
    assert turns({"chat": said(Q, A)}, messages_column="chat") == ONE
    assert (
        turns({"q": said(Q), "a": said("", A)[1:]}, prompt_column="q", response_column="a") == ONE
    )
    assert turns({"id": "0", "data": [Q, A]}, messages_column="data") == ONE
    sql = {"task": Q, "schema": PASSAGE, "sql": A}
    flags = {"prompt_column": "task", "context_column": "schema", "response_column": "sql"}
    assert turns(sql, **flags) == WITH_PASSAGE
    assert turns({"question": Q, "answer": A, "p": PASSAGE}, context_column="p") == WITH_PASSAGE
    with pytest.raises(ValueError, match='the key "prompt"'):
        turns({"prompt": "x", "q": said(Q), "a": A}, prompt_column="q", response_column="a")
    assert turns({"p": SYSTEM, "question": Q, "answer": A}, system_column="p") == WITH_SYSTEM
    with pytest.raises(ValueError, match='the key "instruction" is not read where flags name'):
        turns({"instruction": Q, "question": Q, "answer": A}, prompt_column="question")
    with pytest.raises(ValueError, match='the key "messages" is not read where flags name'):
        turns({"messages": said(Q, A), "q": Q, "answer": A}, prompt_column="q")
    record = {"messages": said("x", "y"), "q": Q, "answer": A}
    assert turns(record, prompt_column="q", ignore_columns=("messages",)) == ONE


VANISHING = [
    ({"prompt": Q, "completion": A, "system": SYSTEM}, WITH_SYSTEM),
    ({"prompt": Q, "completion": A, "input": PASSAGE}, WITH_PASSAGE),
    ({"prompt": "Another?", "completion": "Venus.", "history": [[Q, A]]}, TWO),
    ({"prompt": said(Q), "completion": said("", A)[1:], "system": SYSTEM}, WITH_SYSTEM),
    ({"prompt": said(Q), "completion": said(Q, A), "system": SYSTEM}, WITH_SYSTEM),
    ({"prompt": Q, "completion": said(Q, A)}, ONE),
    ({"prompt": str(said(Q)), "completion": A}, "as Python prints it"),
    ({"messages": said(Q, A), "system_prompt": SYSTEM}, WITH_SYSTEM),
    ({"messages": [{"role": "system", "content": SYSTEM}, *said(Q, A)], "system": SYSTEM},
     WITH_SYSTEM),
    ({"messages": [{"role": "system", "content": "x"}, *said(Q, A)], "system": SYSTEM},
     "two system messages"),
    ({"instruction": Q, "output": A, "response": "Venus."}, 'key "response"'),
    ({"instruction": Q, "output": A, "response": A}, ONE),
    ({"instruction": Q, "passage": PASSAGE, "output": A}, 'key "passage"'),
    ({"instruction": Q, "input": PASSAGE, "context": "More.", "output": A}, 'key "context"'),
    ({"instruction": Q, "output": A, "text": PASSAGE}, 'key "text"'),
    ({"instruction": Q, "output": A, "weight": 0}, 'key "weight"'),
    ({"prompt": Q, "completion": A, "label": False}, 'key "label"'),
    ({"messages": said(Q, A), "context": PASSAGE}, 'key "context"'),
    ({"messages": said(Q, A), "prompt": "Another?"}, 'key "prompt"'),
    ({"messages": said(Q, A), "conversations": spoken("Another?", "x")}, 'key "conversations"'),
    ({"messages": said(Q, A), "conversations": spoken(Q, A)}, ONE),
    ({"messages": said(Q, A), "conversations": spoken(Q, A, name="x")}, 'key "conversations"'),
    ({"messages": said(Q, A), "images": ["a.png"]}, 'key "images"'),
    ({"messages": said(Q, A), "images": [], "tools": None, "evidence": ""}, ONE),
    ({"question": Q, "answer": A, "rationale": "It is red."}, 'key "rationale"'),
    ({"question": Q, "answer": A, "knowledge": PASSAGE}, 'key "knowledge"'),
    ({"instruction": Q, "output": A, "target_language": "French"}, 'key "target_language"'),
    ({"instruction": Q, "output": A, "task": "Answer in French."}, 'key "task"'),
    ({"instruction": Q, "output": A, "source_text": PASSAGE}, 'key "source_text"'),
    ({"instruction": Q, "output": A, "model_answer": "Venus."}, 'key "model_answer"'),
    ({"instruction": Q, "output": A, "source": f"{PASSAGE} " * 4}, 'key "source"'),
    ({"instruction": Q, "output": A, "source": "wiki", "meta": '{"a": [1, 2]}'}, ONE),
    ({"instruction": Q, "output": A, "sources": json.dumps([f"{PASSAGE} " * 4])}, 'key "sources"'),
    ({"instruction": Q, "output": A, "source": {"text": f"{PASSAGE} " * 4}}, 'key "source"'),
    ({"instruction": Q, "output": A, "source": f"[1] {PASSAGE} " * 4}, 'key "source"'),
    ({"instruction": Q, "output": A, "metadata": {"text": f"{PASSAGE} " * 4}}, ONE),
]  # fmt: skip


@pytest.mark.parametrize(("record", "expected"), VANISHING)
def test_texts_are_used_or_refused(record: dict, expected: object) -> None:
    if isinstance(expected, list):
        assert turns(record) == expected
    else:
        with pytest.raises(ValueError, match=str(expected)):
            turns(record)


NAMES = """
    system system_prompt system_message instruction input context prompt question query answer
    output response completion history tools functions documents passage document article
    evidence facts knowledge rationale reasoning thinking explanation cot hint persona language
    title topic task domain category source text content body summary description code
    label weight loss train mask margin score images audio prefix suffix user assistant inputs
    choices solution problem examples table sql url order status meta note dialogue chat turns name
""".split()
LONG = "The passage that the question is about has more than twelve words, as passages do."


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": Q, "output": A},
        {"prompt": Q, "completion": A},
        {"question": Q, "answer": A},
        {"prompt": said(Q), "completion": said("", A)[1:]},
    ],
)
def test_no_text_vanishes(record: dict) -> None:
    """Next to a record, and in its messages."""
    for name in NAMES:
        plants = [record | {name: value} for value in (LONG, [LONG], said(LONG, A))]
        if isinstance(record.get("prompt"), list):
            plants += [record | {"prompt": [{**record["prompt"][0], name: LONG}]}]
        for planted in plants:
            try:
                example = parse_example(planted)
            except ValueError:
                continue
            assert LONG in repr(example), name


@pytest.mark.proof
@pytest.mark.parametrize("name", [n for n, (r, _) in READ.items() if "messages" in r])
def test_tokens_and_masks_are_those_of_trl(name: str, with_template) -> None:
    """With a template that marks answers, as trl's assistant_only_loss requires."""
    trl = pytest.importorskip("trl.trainer.sft_trainer", reason="trl is the reference")
    record = READ[name][0]
    built: Built = with_template(MARKED)
    theirs = trl._tokenize(
        built.tokenizer.transformers_tokenizer,
        record["messages"],
        return_assistant_tokens_mask=True,
        **record.get("chat_template_kwargs", {}),
    )
    flags = {"ignore_columns": ("chat_template_kwargs",)} if name == "smoltalk2" else {}
    config = InstructionConfig(**flags)
    encoder = ExampleEncoder(config, built.tokenizer, built.config)
    ((tokens, counted),) = encoder([("here", parse_example(record, RecordColumns.of(config)))])
    assert tokens.tolist() == theirs["input_ids"]
    assert counted.tolist() == [bool(mask) for mask in theirs["assistant_masks"]]


def test_answers_of_a_history_count(gpt2: Built) -> None:
    """Next to a text, under either name; a list of messages is context."""
    encoder = ExampleEncoder(InstructionConfig(), gpt2.tokenizer, gpt2.config)
    for key in ("prompt", "instruction"):
        record = {key: "Another?", "history": [[Q, A]], "output": "Venus."}
        ((tokens, counted),) = encoder([("here", parse_example(record))])
        end = "<|endoftext|>"
        assert gpt2.tokenizer.detokenize(tokens[counted].tolist()) == f"{A}{end}Venus.{end}"


def test_answers_in_a_prompt_do_not_count(with_template) -> None:
    """trl's completion_mask: after the prompt only."""
    built: Built = with_template(MARKED)
    for template in (MARKED, None):
        flags = {} if template else {"prompt_format": "alpaca"}
        encoder = ExampleEncoder(InstructionConfig(**flags), built.tokenizer, built.config)
        record = {"prompt": said(Q, "Venus.", Q), "completion": said("", A)[1:]}
        ((tokens, counted),) = encoder([("here", parse_example(record))])
        end = "<|im_end|>" if template else "<|endoftext|>"
        assert built.tokenizer.detokenize(tokens[counted].tolist()) == A + end


@pytest.mark.parametrize(
    "name", ["tatsu-lab/alpaca", "yahma/alpaca-cleaned", "databricks-dolly-15k"]
)
def test_alpaca_is_written_as_axolotl_writes_it(name: str, gpt2: Built) -> None:
    """AlpacaPrompter of axolotl: a sentence, "### Instruction:", "### Input:", "### Response:"."""
    encoder = ExampleEncoder(InstructionConfig(), gpt2.tokenizer, gpt2.config)
    example = parse_example(READ[name][0])
    begin = "Below is an instruction that describes a task"
    if example.turns[0].context:
        expected = (
            f"{begin}, paired with an input that provides further context. Write a response that "
            f"appropriately completes the request.\n\n### Instruction:\n{Q}\n\n"
            f"### Input:\n{PASSAGE}\n\n### Response:\n{A}"
        )
    else:
        expected = (
            f"{begin}. Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{Q}\n\n### Response:\n{A}"
        )
    assert encoder.text_of(example) == expected
