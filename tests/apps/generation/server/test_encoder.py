"""A model with an encoder, which reads the prompt: the text is the answer alone."""

import pytest
from serving import TextRunner, served


@pytest.fixture(scope="module")
def client():
    runner = TextRunner(259, max_prompt=64, start_token=256, max_positions=32)
    with served(runner) as server, server.client() as found:
        yield found


def test_megatrons_answer(client):
    body = {"prompts": ["Hello", "one"], "tokens_to_generate": 5, "top_k": 1, "logprobs": True}
    answer = client.put("/api", json=body).json()
    for text, segments, logprobs in zip(*answer.values(), strict=True):
        assert text == "".join(segments) and not text.startswith(("Hello", "one"))
        assert len(segments) == len(logprobs) > 0


def test_openais_answer(client):
    body = {"prompt": "Hello", "max_tokens": 31, "temperature": 0, "logprobs": 0}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert len(choice["text"]) == len(choice["logprobs"]["tokens"])
    messages = [{"role": "user", "content": "Hello"}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "seed": 1})
    # What an encoder reads ends with the end of a text.
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len("user: Hello\nassistant: ") + 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 32}, "longest answer has 31 tokens"),
        ({"prompt": "a" * 65}, "longer than the 64"),
        ({"echo": True}, "an encoder reads the prompt"),
    ],
)
def test_refused(client, fields, words):
    response = client.post("/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_megatrons_limit(client):
    response = client.put("/api", json={"prompts": ["a"], "tokens_to_generate": 32})
    words = "Length of prompt + tokens_to_generate longer than allowed"
    assert response.json() == {"message": words}
