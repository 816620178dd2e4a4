"""Columns of widely used sets of preferences: what is read of each, or how it is refused.

The records are made up; their keys are those of the sets. trl's ``maybe_extract_prompt`` says where
prompts end in the columns that trl reads.
"""

import json

import numpy as np
import pytest

from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.records import Preference, encode_preferences, parse_preference

from ..instruction.conftest import CHATML, Built

Q, GOOD, BAD, SYSTEM = "Name a planet.", "Mars.", "The Moon.", "Be brief."


def said(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]


def spoken(*texts: str) -> list[dict]:
    return [{"from": ("human", "gpt")[n % 2], "value": t} for n, t in enumerate(texts)]


def both(*before: str) -> dict:
    return {"chosen": said(*before, GOOD), "rejected": said(*before, BAD)}


ANSWERS = {"chosen": GOOD, "rejected": BAD}
ONLY_ANSWERS = {"chosen": said("", GOOD)[1:], "rejected": said("", BAD)[1:]}
ASKED = [("user", Q)]
WITH_SYSTEM = [("system", SYSTEM), *ASKED]
AFTER_ANOTHER = [("user", "a"), ("assistant", "b"), *ASKED]
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}
ULTRAFEEDBACK = {
    "prompt": Q, "prompt_id": "ab12", "messages": said(Q, GOOD), "score_chosen": 8.5,
    "score_rejected": 3.0, **both(Q),
}  # fmt: skip
PAIRS = {
    "ultrafeedback_binarized": (ULTRAFEEDBACK, ASKED),
    "ultrafeedback-binarized-preferences-cleaned": (
        {
            "source": "evol", "prompt": Q, **both(Q), "chosen-rating": 5.0, "chosen-model": "m",
            "rejected-rating": 1.0, "rejected-model": "n",
        },
        ASKED,
    ),
    "trl-lib/ultrafeedback_binarized": (
        {**both(Q), "score_chosen": 8.0, "score_rejected": 6.0}, ASKED
    ),
    "orca_dpo_pairs": ({"system": SYSTEM, "question": Q, **ANSWERS}, WITH_SYSTEM),
    "orca_dpo_pairs, no system": ({"system": "", "question": Q, **ANSWERS}, ASKED),
    "distilabel-intel-orca-dpo-pairs": (
        {
            "system": SYSTEM, "input": Q, **ANSWERS, "generations": [GOOD, BAD], "order": ["a"],
            "labelling_model": "m", "labelling_prompt": [{"role": "user", "content": "?"}],
            "raw_labelling_response": "x", "rating": [9.0, 8.0], "rationale": "y",
            "status": "swapped", "original_chosen": BAD, "original_rejected": GOOD,
            "chosen_score": 9.0, "in_gsm8k_train": False,
        },
        WITH_SYSTEM,
    ),
    "distilabel-capybara-dpo-7k-binarized": (
        {
            "source": "x", "conversation": [{"input": Q, "output": "Venus."}],
            "original_response": "Venus.", "generation_prompt": ["x"],
            "raw_generation_responses": ["y"], "new_generations": ["z"], "prompt": Q, **both(Q),
            "rating_chosen": 5, "rating_rejected": 4, "chosen_model": "m", "rejected_model": "n",
        },
        ASKED,
    ),
    "Skywork-Reward-Preference": ({**both(Q), "source": "magpie"}, ASKED),
    "dpo-mix-7k": (
        {"dataset": "x", **both(Q), "chosen_rating": 5.0, "rejected_rating": 1.0}, ASKED
    ),
    "orpo-dpo-mix-40k": ({"source": "x", **both(Q), "prompt": Q, "question": Q}, ASKED),
    "orpo-dpo-mix-40k, several turns": (
        {"source": "x", **both("a", "b", Q), "prompt": "a", "question": "a"}, AFTER_ANOTHER
    ),
    "distilabel-capybara-dpo-7k-binarized, several turns": (
        {
            "source": "x", "prompt": "a", **both("a", "b", Q), "rating_chosen": 5,
            "conversation": [{"input": "a", "output": "b"}, {"input": Q, "output": "Venus."}],
            "original_response": "Venus.",
        },
        AFTER_ANOTHER,
    ),
    "ultrafeedback_binarized, from a table": (
        {
            key: json.dumps(value) if isinstance(value, list) else str(value)
            for key, value in ULTRAFEEDBACK.items()
        },
        ASKED,
    ),
    "comparison_gpt4 (LLaMA-Factory)": (
        {
            "conversations": spoken(Q),
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        ASKED,
    ),
}  # fmt: skip
JUDGED = {
    "kto-mix-14k": {"prompt": said(Q), "completion": said("", GOOD)[1:], "label": True},
    "kto_en_demo (LLaMA-Factory)": {"messages": said(Q, GOOD), "label": True},
    "repeated by messages": {"prompt": said(Q), "completion": said(Q, GOOD), "label": True},
    "repeated, text": {"prompt": Q, "completion": said(Q, GOOD), "label": True},
    "next to messages": {"prompt": Q, "messages": said(Q, GOOD), "label": True},
    "from a table": {"instruction": Q, "output": GOOD, "label": "True"},
    "a number": {"prompt": Q, "completion": GOOD, "label": 1},
    "messages from a table": {"messages": json.dumps(said(Q, GOOD)), "label": "1"},
}
REFUSED = {
    "PKU-SafeRLHF": (
        {"prompt": Q, "response_0": GOOD, "response_1": BAD, "safer_response_id": 0},
        'unknown layout .*"response_0".*--chosen-column',
    ),
    "Nectar": (
        {"prompt": Q, "answers": [{"answer": GOOD, "model": "m", "rank": 1.0}], "turns": 1},
        'unknown layout .*"answers"',
    ),
    "SHP": (
        {"post_id": "p", "history": Q, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1},
        'unknown layout .*"human_ref_A"',
    ),
    "HelpSteer2 preference": (
        {"prompt": Q, "response_1": GOOD, "response_2": BAD, "preference_strength": 2},
        'unknown layout .*"response_1"',
    ),
    "another prompt": ({"prompt": "A star?", **both(Q)}, '"chosen" and "rejected" and.*"prompt"'),
    "another instruction": ({"instruction": "A star?", **both(Q)}, 'another in "instruction"'),
    "other messages": ({"messages": said("A star?"), **both(Q)}, 'another in "messages"'),
    "no messages": ({"prompt": [], **ONLY_ANSWERS}, 'no "prompt" before "chosen" and'),
    "messages and prompt": (
        {"messages": said("A star?"), "prompt": Q, **ANSWERS}, 'another in "prompt"'
    ),
    "an answer before the answers": (
        {"messages": said(Q, "Venus."), **ANSWERS}, '"messages" is the prompt.*ends with an answer'
    ),
    "texts that repeat": (
        {"prompt": Q, "chosen": f"{Q} {GOOD}", "rejected": f"{Q} {BAD}"},
        '"chosen" and "rejected" repeat the text of "prompt"',
    ),
    "lists as Python prints them": (
        {"prompt": Q, "chosen": str(said(Q, GOOD)), "rejected": str(said(Q, BAD))},
        '"chosen" is a list of messages as Python prints it, not JSON',
    ),
    "two systems": ({"system": "Be long.", "chosen": [SYSTEM_MESSAGE, *said(Q, GOOD)],
                     "rejected": [SYSTEM_MESSAGE, *said(Q, BAD)]}, "two system messages"),
    "a weight of 0": (
        {"prompt": said(Q), "chosen": [said("", GOOD)[1] | {"weight": 0}],
         "rejected": said("", BAD)[1:]},
        "weight of 0",
    ),
    "calls without a form": (
        {"prompt": said(Q), **ONLY_ANSWERS, "images": ["a.png"]}, 'the key "images"'
    ),
}  # fmt: skip


def read(record: dict, **flags: object) -> Preference:
    return parse_preference(record, RecordColumns.of(InstructionConfig(**flags)))


def parts(preference: Preference) -> list[list[tuple[str, str]]]:
    return [[(t.role, t.text) for t in each] for each in (preference.prompt, *preference.answers)]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_are_read(name: str) -> None:
    record, prompt = PAIRS[name]
    assert parts(read(record)) == [prompt, [("assistant", GOOD)], [("assistant", BAD)]]
    with pytest.raises(ValueError, match='the key "evidence" .*--ignore-columns evidence'):
        read(record | {"evidence": "The moon is made of rock."})


REPEATED = [
    ({"prompt": said(Q), **both(Q)}, ASKED),
    ({"conversations": spoken(Q), **both(Q)}, ASKED),
    ({"instruction": Q, **both(Q)}, ASKED),
    ({"question": Q, **both(Q)}, ASKED),
    ({"system": SYSTEM, "messages": said(Q), **ANSWERS}, WITH_SYSTEM),
    ({"system": SYSTEM, "prompt": said(Q), **both(Q)}, WITH_SYSTEM),
    ({"system": SYSTEM, "chosen": [SYSTEM_MESSAGE, *said(Q, GOOD)],
      "rejected": [SYSTEM_MESSAGE, *said(Q, BAD)]}, WITH_SYSTEM),
    ({"prompt": Q, "messages": said(Q, GOOD), **ONLY_ANSWERS}, ASKED),
    ({"messages": said(Q, GOOD), **ANSWERS}, ASKED),
    ({"prompt": said("a", "b", Q), **both("a", "b", Q)}, AFTER_ANOTHER),
    ({"prompt": Q, "history": [["a", "b"]], **ANSWERS}, AFTER_ANOTHER),
]  # fmt: skip


@pytest.mark.parametrize(("record", "prompt"), REPEATED)
def test_repeated_prompts_are_read_once(record: dict, prompt: list) -> None:
    assert parts(read(record)) == [prompt, [("assistant", GOOD)], [("assistant", BAD)]]


def test_a_question_is_kept_where_both_answers_begin_alike() -> None:
    record = {"system": SYSTEM, "question": Q, "chosen": "It is Mars.", "rejected": "It is Venus."}
    answers = [[("assistant", "It is Mars.")], [("assistant", "It is Venus.")]]
    assert parts(read(record)) == [WITH_SYSTEM, *answers]


def test_hh_rlhf() -> None:
    begin = f"\n\nHuman: {Q}\n\nAssistant:"
    found = read({"chosen": f"{begin} {GOOD}", "rejected": f"{begin} {BAD}"})
    assert parts(found) == [
        [("user", begin)],
        [("assistant", f" {GOOD}")],
        [("assistant", f" {BAD}")],
    ]
    assert found.is_text


@pytest.mark.parametrize("name", JUDGED)
def test_judged_answers_that_are_read(name: str) -> None:
    found = read(JUDGED[name])
    assert parts(found) == [ASKED, [("assistant", GOOD)]] and found.good is True
    with pytest.raises(ValueError, match='the key "evidence"'):
        read(JUDGED[name] | {"evidence": "The moon is made of rock."})


@pytest.mark.parametrize("name", REFUSED)
def test_sets_that_are_refused(name: str) -> None:
    record, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read(record)


def test_margins_of_tables() -> None:
    assert read({"prompt": Q, **ANSWERS, "margin": "1.5"}).margin == 1.5
    assert read({"prompt": Q, **ANSWERS, "margin": ""}).margin is None


def test_columns_by_flags() -> None:
    flags = {"prompt_column": "q", "chosen_column": "better", "rejected_column": "worse"}
    found = read({"q": Q, "better": GOOD, "worse": BAD}, **flags)
    assert parts(found) == [ASKED, [("assistant", GOOD)], [("assistant", BAD)]]
    flags = {"prompt_column": "q", "response_column": "a", "label_column": "liked"}
    assert read({"q": Q, "a": GOOD, "liked": False}, **flags).good is False
    with pytest.raises(
        ValueError, match=r'--chosen-column best: no such column \(the columns: "q"'
    ):
        read({"q": Q, "better": GOOD, "worse": BAD}, chosen_column="best")


READ_BY_TRL = ["ultrafeedback_binarized", "trl-lib/ultrafeedback_binarized", "dpo-mix-7k",
               "Skywork-Reward-Preference", "ultrafeedback-binarized-preferences-cleaned",
               "orpo-dpo-mix-40k", "orpo-dpo-mix-40k, several turns",
               "distilabel-capybara-dpo-7k-binarized, several turns"]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("name", READ_BY_TRL)
def test_tokens_are_those_of_trl(name: str, with_template) -> None:
    data_utils = pytest.importorskip("trl.data_utils", reason="trl says where a prompt ends")
    built: Built = with_template(CHATML)
    tokenizer = built.tokenizer.transformers_tokenizer
    record = PAIRS[name][0]
    columns = {key: record[key] for key in ("prompt", "chosen", "rejected") if key in record}
    theirs = data_utils.apply_chat_template(data_utils.maybe_extract_prompt(columns), tokenizer)
    encoder = ExampleEncoder(InstructionConfig(), built.tokenizer, built.config)
    (ours,) = encode_preferences([("here", read(record))], encoder)
    for key, answer in zip(("chosen", "rejected"), ours.answers, strict=True):
        whole = np.concatenate((ours.prompt, answer)).tolist()
        assert whole == tokenizer(theirs["prompt"] + theirs[key])["input_ids"]
    assert ours.prompt.tolist() == tokenizer(theirs["prompt"])["input_ids"]
