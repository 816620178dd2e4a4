"""OpenAI's API: what is answered, streamed, and refused."""

import json

import pytest
from serving import NAME, PlainChat, TextRunner, byte_tokenizer, events, served
from test_megatron_api import alone

from megatron.apps.generation.request import Sampling, StopRules

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client, path, **body):
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def refused(client, path, **body):
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


def test_completion(server, client):
    answer = post(client, COMPLETIONS, prompt="Hello", max_tokens=5, temperature=0, model=NAME)
    one = alone(server, "Hello", sampling=Sampling(greedy=True), stopping=StopRules(5))
    (choice,) = answer["choices"]
    assert choice["text"] == bytes(one.tokens).decode()
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("length", None, 0)
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 5, 10)


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_paths_with_and_without_v1(client, prefix):
    (model,) = client.get(f"{prefix}/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, 1024)
    assert client.get(f"{prefix}/models/{NAME}").json() == model
    assert client.get(f"{prefix}/models/other").status_code == 404
    assert post(client, f"{prefix}/completions", prompt="a", max_tokens=1)["choices"]
    assert post(client, f"{prefix}/chat/completions", messages=USER, max_tokens=1)["choices"]


def test_16_tokens_are_the_default(client):
    answer = post(client, COMPLETIONS, prompt="a", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


def test_forms_of_prompts(client):
    ids = byte_tokenizer().tokenize("ab")
    given = ["ab", ids, ["ab", "ab"], [ids, ids]]
    texts = [
        [c["text"] for c in post(client, COMPLETIONS, prompt=p, temperature=0)["choices"]]
        for p in given
    ]
    assert texts[0] == texts[1] and texts[2] == texts[3] == texts[0] * 2


def test_n_texts_of_a_seed(client):
    body = {"prompt": ["ab", "cd"], "seed": 3, "max_tokens": 6}
    first = post(client, COMPLETIONS, n=2, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    assert texts == [c["text"] for c in post(client, COMPLETIONS, n=2, **body)["choices"]]
    alone_ = post(client, COMPLETIONS, prompt="ab", seed=3, max_tokens=6)["choices"][0]["text"]
    assert texts[0] == alone_
    assert first["usage"]["prompt_tokens"] == 4


def test_logprobs_with_echo(server, client):
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    (choice,) = post(client, COMPLETIONS, **body)["choices"]
    sampling, stopping = Sampling(greedy=True), StopRules(3)
    one = alone(
        server, "Hello", sampling=sampling, stopping=stopping, logprobs=2, prompt_logprobs=2
    )
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(8))
    scores = [score.logprob for score in one.prompt_scores + one.scores]
    assert found["token_logprobs"] == [None, *scores]
    assert found["top_logprobs"][0] is None
    assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])
    assert found["top_logprobs"][-1][found["tokens"][-1]] == scores[-1]


def test_scoring_a_prompt(client):
    body = {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = post(client, COMPLETIONS, **body)["choices"]
    assert choice["text"] == "Hello" and len(choice["logprobs"]["token_logprobs"]) == 5


def test_a_stream_is_the_answer_in_pieces(client):
    body = {"prompt": "Hello", "seed": 4, "max_tokens": 9, "n": 2, "logprobs": 1}
    answer = post(client, COMPLETIONS, **body)
    chunks = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and "usage" in chunks[0]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        whole = answer["choices"][index]
        assert "".join(piece["text"] for piece in own) == whole["text"]
        assert [p["finish_reason"] for p in own if p["finish_reason"]] == [whole["finish_reason"]]
        tokens = [token for piece in own for token in piece["logprobs"]["token_logprobs"]]
        assert tokens == whole["logprobs"]["token_logprobs"]


def test_a_stream_echoes_the_prompt_first(client):
    chunks = streamed(client, COMPLETIONS, prompt="Hello", echo=True, max_tokens=2)
    assert chunks[0]["choices"][0]["text"] == "Hello" and "usage" not in chunks[0]
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    whole = post(client, COMPLETIONS, **body)["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        got = [c["choices"][0]["logprobs"][name] for c in streamed(client, COMPLETIONS, **body)]
        assert sum(got, []) == whole[name]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_is_left_out(client, stream):
    whole = post(client, COMPLETIONS, prompt="ab", seed=8, max_tokens=20, ignore_eos=True)
    text = whole["choices"][0]["text"]
    body = {"prompt": "ab", "seed": 8, "max_tokens": 20, "stop": [text[6:9]], "ignore_eos": True}
    if stream:
        chunks = streamed(client, COMPLETIONS, **body)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = post(client, COMPLETIONS, **body)["choices"]
        got, finish = choice["text"], choice["finish_reason"]
        assert finish == "stop"
    assert got == text[: text.index(text[6:9])]


def test_chat(client):
    body = {"messages": USER, "temperature": 0, "max_tokens": 3, "logprobs": True}
    answer = post(client, CHAT, **body, top_logprobs=2)
    (choice,) = answer["choices"]
    same = post(client, COMPLETIONS, prompt="user: hi\nassistant: ", temperature=0, max_tokens=3)
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == same["choices"][0]["text"]
    assert answer["object"] == "chat.completion"
    content = choice["logprobs"]["content"]
    assert "".join(row["token"] for row in content) == choice["message"]["content"]
    assert all(len(row["top_logprobs"]) == 2 and row["bytes"] for row in content)
    chunks = streamed(client, CHAT, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == choice["message"]["content"]
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_chat_continues_as_long_as_there_is_room():
    with served(TextRunner(259, max_positions=100)) as server, server.client() as client:
        answer = post(client, CHAT, messages=USER, seed=1, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_document_ends_a_text_and_is_no_part_of_it(client, stream):
    body = {"prompt": "ab", "seed": 2, "max_tokens": 400, "logprobs": 0}
    longer = post(client, COMPLETIONS, **body, ignore_eos=True)["choices"][0]["text"]
    assert "<eos>" in longer
    if stream:
        chunks = [c["choices"][0] for c in streamed(client, COMPLETIONS, **body)]
        text, finish = "".join(c["text"] for c in chunks), chunks[-1]["finish_reason"]
        tokens = [token for c in chunks for token in c["logprobs"]["tokens"]]
    else:
        (choice,) = post(client, COMPLETIONS, **body)["choices"]
        text, finish = choice["text"], choice["finish_reason"]
        tokens = choice["logprobs"]["tokens"]
    assert (text, finish) == (longer[: longer.index("<eos>")], "stop")
    assert "".join(tokens) == text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_any_token_that_the_model_names_ends_a_text(client, path):
    """It may name as many as Llama 3 does."""
    asked = {"messages": USER} if path == CHAT else {"prompt": "ab"}

    def write(client, **more):
        (choice,) = post(client, path, **asked, seed=2, max_tokens=300, **more)["choices"]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    with served(ends=b"etaoin") as other, other.client() as ended:
        text, longer = write(ended), write(client)
        assert write(ended, ignore_eos=True).startswith(longer)
    assert longer.startswith(text) and longer[len(text)] in "etaoin"
    assert not set(text) & set("etaoin")


def test_parts_of_a_message(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}]
    body = {"temperature": 0, "max_completion_tokens": 4}
    assert (
        post(client, CHAT, messages=messages, **body)["choices"]
        == post(client, CHAT, messages=USER, **body)["choices"]
    )


def test_a_prefix_that_was_computed_is_counted(client):
    prompt = "The same beginning of two requests, longer than a page or two."
    for cached in (0, 48):
        usage = post(client, COMPLETIONS, prompt=prompt, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    options = {"include_usage": True}
    chunks = streamed(client, COMPLETIONS, prompt=prompt, max_tokens=1, stream_options=options)
    assert chunks[-1]["usage"] == usage


REFUSED = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[1], "a", 2]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [1] * 20000}, "max_tokens"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1024}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 1000, "n": 13}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": -1}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"max_token": 1}, "max_token"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_completions(client, fields, param):
    status, error = refused(client, COMPLETIONS, **{"prompt": "a", **fields})
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")


REFUSED_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHAT)
def test_refused_chats(client, fields, param):
    status, error = refused(client, CHAT, **{"messages": USER, "max_tokens": 2, **fields})
    assert (status, error["param"]) == (400, param)


def test_another_model(client):
    status, error = refused(client, COMPLETIONS, prompt="a", model="gpt-4")
    assert (status, error["code"]) == (404, "model_not_found")


def test_null_is_no_value(client):
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "seed", "logprobs", "user", "n"))
    assert post(client, COMPLETIONS, prompt="a", **nulls)["usage"]["prompt_tokens"] == 1


def test_errors_of_other_paths_and_methods(client):
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    response = client.get("/api")
    assert (response.status_code, list(response.json())) == (405, ["message"])
    assert json.loads(client.get(COMPLETIONS).text)["error"]["message"]


def test_what_begins_another_turn_ends_an_answer():
    """Of a chat format whose turns have no special tokens."""

    class Echoing(PlainChat):
        stops = ("o",)

    with served(chat=Echoing()) as server, server.client() as client:
        body = {"messages": USER, "seed": 3, "max_tokens": 400, "ignore_eos": True}
        (choice,) = post(client, CHAT, **body)["choices"]
        assert choice["finish_reason"] == "stop" and "o" not in choice["message"]["content"]


def test_the_model_may_be_an_adapter():
    """Which it says in the answer; another name is refused with those that there are."""
    with served(TextRunner(259, adapters=("legal", "code"))) as server, server.client() as client:
        models = client.get("/v1/models").json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            (NAME, None), ("legal", NAME), ("code", NAME),
        ]  # fmt: skip
        assert client.get("/v1/models/code").json() == models[2]
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
            for name in ("code", NAME):
                server.runner.steps.clear()
                answer = post(client, path, **body, model=name, max_tokens=2)
                assert answer["model"] == name
                used = {part.adapter for step in server.runner.steps for part in step.parts}
                assert used == {None if name == NAME else name}
            status, error = refused(client, path, **body, model="other")
            assert (status, error["code"]) == (404, "model_not_found")
            assert "this server has 'fake', 'legal', 'code'" in error["message"]
        server.runner.steps.clear()
        asked = {"prompts": ["ab", "c"], "tokens_to_generate": 2, "adapter": "legal"}
        assert client.put("/api", json=asked).status_code == 200
        assert {p.adapter for step in server.runner.steps for p in step.parts} == {"legal"}
        wrong = client.put("/api", json=asked | {"adapter": "x"})
        assert wrong.status_code == 400
        assert "there is no adapter 'x'; the model has legal, code" in wrong.text
