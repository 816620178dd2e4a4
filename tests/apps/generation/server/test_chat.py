"""Chats with the formats that models really have."""

import pytest
from serving import byte_tokenizer, served

from megatron.apps.generation.decoding.chat import ChatFormat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def client():
    chat = ChatFormat.of(byte_tokenizer(), template=TEMPLATE)
    with served(chat=chat) as server, server.client() as found:
        yield found
    chat.close()


def test_a_template_makes_the_prompt(client):
    body = {"temperature": 0, "max_tokens": 4}
    chat = client.post(
        "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "hi"}]}
    ).json()
    same = client.post("/v1/completions", json={**body, "prompt": "<user>hi<a>"}).json()
    assert chat["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len("<user>hi<a>")


def test_what_a_template_refuses(client):
    messages = [{"role": "system", "content": "x"}]
    response = client.post("/v1/chat/completions", json={"messages": messages})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "no system here" in error["message"]


def test_the_plain_format():
    with served(chat=ChatFormat.of(byte_tokenizer())) as server, server.client() as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        assert answer.json()["usage"]["prompt_tokens"] == len("User: hi\nAssistant:")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_regex": "(ab){3}"}, "ababab"),
        ({"structured_outputs": {"regex": "x+y"}}, None),
        ({"response_format": {"type": "json_object"}}, None),
    ],
)
def test_constrained_texts(client, fields, expected):
    body = {"prompt": "a", "max_tokens": 60, "seed": 1, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.is_success, response.text
    (choice,) = response.json()["choices"]
    if expected is None:
        assert choice["text"][0] in "x{"
    else:
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


def test_a_constraint_that_is_wrong(client):
    response = client.post("/v1/completions", json={"prompt": "a", "guided_regex": "("})
    assert response.status_code == 400 and "regular expression" in response.text
