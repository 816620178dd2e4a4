"""Megatron's API: every message, their order, and what is answered."""

import json
from dataclasses import replace

import pytest
from serving import byte_tokenizer, served

from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.server.config import RequestDefaults
from megatron.apps.generation.server.exchange import RequestError
from megatron.apps.generation.server.megatron_api import MegatronRequest, parsed
from megatron.apps.generation.server.service import seed_of

_TOKENS = "tokens_to_generate must be an integer greater than "
_TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
_TOP_K = "equal to or greater than 0 and less than or equal to 1000"

# The fields besides prompts ["a"], and the message. In the order of the checks.
MESSAGES = [
    ({"max_len": 1}, "max_len is no longer used.  Replace with tokens_to_generate"),
    ({"sentences": []}, "sentences is no longer used.  Replace with prompts"),
    ({"prompts": "a"}, "prompts is not a list of strings"),
    ({"prompts": None}, "prompts is not a list of strings"),
    ({"prompts": [1]}, "prompts is not a list of strings"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
    ({"tokens_to_generate": "1"}, f"{_TOKENS}0"),
    ({"tokens_to_generate": 1.0}, f"{_TOKENS}0"),
    ({"tokens_to_generate": True}, f"{_TOKENS}0"),
    ({"tokens_to_generate": None}, f"{_TOKENS}0"),
    ({"tokens_to_generate": -1}, f"{_TOKENS}or equal to 0"),
    ({"logprobs": 1}, "logprobs must be a boolean value"),
    ({"tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    ({"temperature": "1"}, _TEMPERATURE),
    ({"temperature": 0}, _TEMPERATURE),
    ({"temperature": 100.5}, _TEMPERATURE),
    ({"top_k": 1.0}, f"top_k must be an integer {_TOP_K}"),
    ({"top_k": -1}, f"top_k must be {_TOP_K}"),
    ({"top_k": 1001}, f"top_k must be {_TOP_K}"),
    ({"top_p": "1"}, "top_p must be a positive float less than or equal to 1.0"),
    ({"top_p": 2.0, "top_k": 1}, "cannot set both top-k and top-p samplings."),
    ({"top_p": 1.5}, "top_p must be less than or equal to 1.0"),
    ({"top_p": -0.5}, "top_p must be less than or equal to 1.0"),
    (
        {"top_p": 0.5, "top_p_decay": "1"},
        "top_p_decay must be a positive float less than or equal to 1.0",
    ),
    ({"top_p_decay": 2.0}, "top_p_decay cannot be set without top_p"),
    ({"top_p": 0.5, "top_p_decay": 2.0}, "top_p_decay must be less than or equal to 1.0"),
    (
        {"top_p": 0.5, "top_p_bound": "1"},
        "top_p_bound must be a positive float less than or equal to top_p",
    ),
    ({"top_p_bound": 0.5}, "top_p_bound cannot be set without top_p"),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be greater than 0 and less than top_p"),
    ({"top_p": 0.5, "top_p_bound": 0.0}, "top_p_bound must be greater than 0 and less than top_p"),
    ({"add_BOS": 1}, "add_BOS must be a boolean value"),
    ({"prompts": ["a", ""]}, "Empty prompts require add_BOS=true"),
    ({"stop_on_double_eol": 1}, "stop_on_double_eol must be a boolean value"),
    ({"stop_on_eol": "true"}, "stop_on_eol must be a boolean value"),
    ({"prevent_newline_after_colon": 0}, "prevent_newline_after_colon must be a boolean value"),
    ({"random_seed": 1.5}, "random_seed must be integer"),
    ({"random_seed": -1}, "random_seed must be a positive integer"),
    ({"no_log": None}, "no_log must be a boolean value"),
    ({"beam_width": "2"}, "beam_width must be integer"),
    ({"beam_width": 0}, "beam_width must be an integer > 1"),
    ({"beam_width": 1, "prompts": ["a", "b"]}, "When doing beam_search, batch size must be 1"),
    ({"stop_token": 1.5}, "stop_token must be an integer"),
    ({"length_penalty": "1"}, "length_penalty must be a float"),
    ({"adapter": 1}, "adapter must be a string"),
    ({"max_tokens": 1}, "max_tokens is not a field of this request; use tokens_to_generate"),
    ({"top_q": 1}, "top_q is not a field of this request; did you mean top_p?"),
]


def message(body):
    with pytest.raises(RequestError) as caught:
        parsed(body, RequestDefaults())
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(("fields", "expected"), MESSAGES)
def test_message(fields, expected):
    assert message({"prompts": ["a"], **fields}) == expected


def test_prompts_are_required():
    assert message({}) == "prompts argument required"
    assert message({"max_len": 1}) == MESSAGES[0][1]


def test_an_earlier_check_comes_first():
    rows = [row for row in MESSAGES if "prompts" not in row[0]]
    for (first, expected), (second, _) in zip(rows, rows[1:], strict=False):
        if not first.keys() & second.keys() and "top_p" not in second:
            assert message({"prompts": ["a"], **second, **first}) == expected


def test_defaults_are_upstreams():
    assert parsed({"prompts": ["a"]}, RequestDefaults()) == MegatronRequest(("a",))
    assert MegatronRequest(("a",)).tokens_to_generate == 64


def test_flags_are_defaults_of_requests_that_do_not_say():
    given = RequestDefaults(0.5, 0, 0.9)
    assert parsed({"prompts": ["a"]}, given).top_p == 0.9
    assert parsed({"prompts": ["a"], "top_k": 5}, given).top_p == 0.0
    assert parsed({"prompts": ["a"], "temperature": 2}, given).temperature == 2


def test_whole_numbers_are_taken_for_floats():
    body = {"prompts": ["a"], "top_p": 1, "top_p_decay": 1, "top_p_bound": 1, "length_penalty": 2}
    assert parsed(body, RequestDefaults()) == MegatronRequest(
        ("a",), top_p=1, top_p_decay=1, top_p_bound=1, length_penalty=2
    )


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_errors_are_messages_of_status_400(client, method):
    response = client.request(method, "/api", json={"prompts": []})
    assert (response.status_code, response.json()) == (400, {"message": "prompts is empty"})


def alone(server, prompt, **fields):
    """What the engine itself gives, as tokens and log-probabilities."""
    tokenizer = byte_tokenizer()
    request = GenerationRequest(tuple(tokenizer.tokenize(prompt)), **fields)
    engine = GenerationEngine(type(server.runner)(259), tokenizer)
    (found,) = engine.complete([request])
    return found


def put(client, **body):
    response = client.put("/api", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_answer(server, client):
    prompts = ["Hello world", "One:"]
    body = {"prompts": prompts, "tokens_to_generate": 6, "random_seed": 5, "logprobs": True}
    answer = put(client, **body, temperature=0.7, top_p=0.9)
    assert list(answer) == ["text", "segments", "logprobs"]
    for index, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.7, top_p=0.9, seed=seed_of(5, index))
        stopping = StopRules(6, frozenset({258}))
        one = alone(
            server, prompt, sampling=sampling, stopping=stopping, logprobs=0, prompt_logprobs=0
        )
        assert answer["text"][index] == prompt + bytes(one.tokens).decode()
        assert answer["segments"][index] == list(answer["text"][index])
        scores = [score.logprob for score in one.prompt_scores + one.scores]
        assert answer["logprobs"][index] == scores
        assert len(scores) == len(answer["segments"][index]) - 1


def test_any_token_that_the_model_names_ends_a_text(client):
    """And is a part of it, as in Megatron; in a beam search, too."""
    body = {"prompts": ["ab"], "tokens_to_generate": 300, "random_seed": 2}
    with served(ends=b"etaoin") as other, other.client() as ended:
        (text,), (longer,) = put(ended, **body)["segments"], put(client, **body)["segments"]
        beams = put(ended, **body, beam_width=2)["segments"]
        (chosen,) = put(ended, **body, beam_width=1, stop_token=258)["segments"]
    ends = {*"etaoin", "<eos>"}
    assert longer[: len(text)] == text and text[-1] in "etaoin"
    assert {each[-1] for each in beams} <= ends and chosen[-1] == "<eos>"
    assert not ends.intersection(*(each[2:-1] for each in (text, *beams)))


def test_logprobs_are_null_as_a_whole(client):
    assert put(client, prompts=["a"], tokens_to_generate=1)["logprobs"] is None


def test_top_k_1_is_greedy(client):
    answers = [put(client, prompts=["abc"], top_k=1, tokens_to_generate=8) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0] != put(client, prompts=["abc"], tokens_to_generate=8)


def test_scoring(client):
    answer = put(client, prompts=["abc"], tokens_to_generate=0, logprobs=True)
    assert answer["text"] == ["abc"] and len(answer["logprobs"][0]) == 2


def test_bos_is_the_end_of_a_document_and_shows(client):
    answer = put(client, prompts=["", "ab"], add_BOS=True, tokens_to_generate=0, logprobs=True)
    assert answer["segments"] == [["<eos>"], ["<eos>", "a", "b"]]
    assert [len(row) for row in answer["logprobs"]] == [0, 2]


def test_a_line_ends_the_text_and_stays(client):
    answer = put(client, prompts=["x"], stop_on_eol=True, tokens_to_generate=300, random_seed=1)
    assert answer["text"][0].count("\n") == 1 and answer["text"][0].endswith("\n")


def test_two_line_ends_end_the_text_the_first_may_be_the_prompts(client):
    body = {"tokens_to_generate": 400, "stop_on_double_eol": True, "random_seed": 1}
    text = put(client, prompts=["x"], **body)["text"][0]
    assert text.count("\n\n") == 1 and text.endswith("\n\n") and text.count("\n") > 2
    prompts, short = ["x\n"] * 100, {**body, "tokens_to_generate": 2}
    texts = put(client, prompts=prompts, **short)["text"]
    assert "x\n\n" in texts and not any(
        text.startswith("x\n\n") for text in texts if text != "x\n\n"
    )


def test_stop_token_stays_in_the_text(client):
    greedy = put(client, prompts=["abc"], top_k=1, tokens_to_generate=8)["text"][0]
    token = ord(greedy[5])
    answer = put(client, prompts=["abc"], top_k=1, tokens_to_generate=8, stop_token=token)
    assert answer["text"] == [greedy[: greedy.index(chr(token), 3) + 1]]


def test_beams(client):
    body = {"prompts": ["abc"], "tokens_to_generate": 4, "beam_width": 3, "length_penalty": 1}
    answer = put(client, **body)
    assert list(answer) == ["text", "segments", "scores"]
    assert len(answer["text"]) == 3
    assert answer["scores"] == sorted(answer["scores"], reverse=True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"prompts": ["ab"] * 20, "tokens_to_generate": 1000},
            "Too many tokens.  20040 is greater than 12000",
        ),
        (
            {"prompts": ["ab"], "tokens_to_generate": 1023},
            "Length of prompt + tokens_to_generate longer than allowed",
        ),
        (
            {"prompts": ["ab"], "tokens_to_generate": 1023, "beam_width": 2},
            "context length + tokens_to_generate too large",
        ),
        (
            {"prompts": ["ab"], "tokens_to_generate": 0, "logprobs": True, "beam_width": 2},
            "context length + tokens_to_generate too large",
        ),
    ],
)
def test_limits(client, body, expected):
    response = client.put("/api", json=body)
    assert (response.status_code, response.json()) == (400, {"message": expected})


def test_texts_of_one_seed_differ_and_the_first_is_the_one_alone():
    seeds = [seed_of(7, index) for index in range(3)]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    assert seed_of(None, 1) is None


def test_the_documented_command(server, client):
    body = '{"prompts":["Hello world"], "tokens_to_generate":1}'
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    answer = client.put("/api", content=body, headers=headers).json()
    assert answer["text"][0].startswith("Hello world")
    assert json.dumps(answer)
    assert replace(MegatronRequest(("a",)), no_log=True).no_log
