"""OpenAI's Python package as a client of the generation server."""

import asyncio
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name, reason="pip install -e '.[serve]'")
pytest.importorskip("httpx", reason="pip install httpx")
openai = pytest.importorskip("openai", reason="pip install openai")

from counted_model import counted_tokenizer  # noqa: E402
from counted_server import counted_server  # noqa: E402

PROMPT = "The checkpoint of a"
KEY = "a key of the tests"


@pytest.fixture(scope="module")
def server():
    with counted_server(key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


@pytest.fixture
def complete(client, server):
    """Completes a prompt with 12 greedy tokens, unless something else is asked for."""

    def ask(prompt=PROMPT, **fields):
        fields = {"max_tokens": 12, "temperature": 0, **fields}
        return client.completions.create(model=server.name, prompt=prompt, **fields)

    return ask


@pytest.fixture
def chat(client, server):
    def ask(*contents, **fields):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        fields = {"max_completion_tokens": 12, "temperature": 0, **fields}
        return client.chat.completions.create(model=server.name, messages=messages, **fields)

    return ask


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [server.name]
    assert client.models.retrieve(server.name).owned_by == "megatron-deepspeed"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion_and_its_stream(complete):
    whole = complete()
    [choice] = whole.choices
    assert whole.object == "text_completion" and choice.finish_reason == "length"
    prompt = len(counted_tokenizer().tokenize(PROMPT))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, 12)
    assert whole.usage.total_tokens == prompt + 12
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 6
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12 and chunks[0].usage is None


def test_chat_and_its_stream(chat):
    whole = chat("What is in a checkpoint?")
    [choice] = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert whole.usage.completion_tokens == 12 and choice.finish_reason == "length"
    chunks = list(chat("What is in a checkpoint?", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == choice.message.content and len(chunks) > 6
    other = chat("What is in a checkpoint?", choice.message.content, "And then?")
    assert other.usage.prompt_tokens > whole.usage.prompt_tokens


def test_log_probabilities(complete, chat):
    found = complete(logprobs=3).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    best = [max(top.values()) for top in found.logprobs.top_logprobs]
    assert found.logprobs.token_logprobs == best  # greedy
    assert all(len(top) == 3 for top in found.logprobs.top_logprobs)
    starts = [sum(map(len, found.logprobs.tokens[:i])) for i in range(12)]
    assert found.logprobs.text_offset == starts

    found = chat("What?", logprobs=True, top_logprobs=2).choices[0]
    content = found.logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == found.message.content
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_echo_scores_a_text(complete):
    """Continuations that are scored have the log-probabilities that they were generated with."""
    made = complete(logprobs=1).choices[0]
    text = PROMPT + made.text
    scored = complete(text, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == text and "".join(scored.logprobs.tokens) == text
    assert scored.logprobs.token_logprobs[0] is None
    if scored.logprobs.tokens[-12:] == made.logprobs.tokens:
        same = zip(scored.logprobs.token_logprobs[-12:], made.logprobs.token_logprobs, strict=True)
        assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in same)


def test_n_and_seed(complete):
    """Texts of one request differ; a seed gives the same ones, whatever else is running."""
    asked = {"temperature": 2.0, "n": 3, "seed": 4}
    texts = [choice.text for choice in complete(**asked).choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in complete([PROMPT, "Other"], **asked).choices][:3] == texts
    assert complete(temperature=2.0, seed=5).choices[0].text not in texts
    streamed = ["", "", ""]
    for chunk in complete(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_stop(complete):
    """Neither the text that stops nor what follows it is in the answer, streamed or not."""
    text = complete().choices[0].text
    stop = text[len(text) // 2 :][:3]
    before = text[: text.index(stop)]
    found = complete(stop=[stop, "never"]).choices[0]
    assert (found.text, found.finish_reason) == (before, "stop")
    chunks = list(complete(stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_errors(complete, chat, server):
    """In the classes that the package has for them, with the field at fault."""
    for fields, param in (
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"extra_body": {"min_p": 7}}, "min_p"),
        ({"suffix": "x"}, "suffix"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(**fields)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError, match="messages"):
        chat()
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat("x", tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        complete(extra_body={"model": "gpt-4"})
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError, match="key"):
        wrong.models.list()


def test_a_closed_stream_is_cancelled():
    """The server stops to compute once the client has gone."""
    with counted_server(delay=0.02) as slow:
        client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        asked = {"model": slow.name, "prompt": PROMPT, "max_tokens": 1000}
        with client, client.completions.create(**asked, stream=True) as stream:
            next(iter(stream))
            assert slow.get("/health")["running"] == 1
        slow.wait_until_idle()


@pytest.mark.proof
def test_many_at_once(server):
    """Answers of concurrent requests are those of the same requests alone."""

    async def ask(client, number: int) -> str:
        found = await client.completions.create(
            model=server.name, prompt=PROMPT, max_tokens=20, seed=number, temperature=1.0
        )
        return found.choices[0].text

    async def both() -> tuple[list[str], list[str]]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        async with client:
            alone = [await ask(client, number) for number in range(16)]
            return alone, await asyncio.gather(*(ask(client, number) for number in range(16)))

    alone, together = asyncio.run(both())
    assert alone == together and len(set(alone)) > 12


@pytest.mark.proof
def test_constraints(chat, complete):
    """By the fields of OpenAI and of vLLM."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    pieces = enumerate(counted_tokenizer().token_bytes)
    blanks = {token: -100 for token, piece in pieces if piece.isspace()}  # JSON may have many
    asked = {"max_completion_tokens": 60, "logit_bias": blanks}
    found = chat("Is it?", response_format=wanted, **asked)
    assert set(json.loads(found.choices[0].message.content)) == {"ok"}
    found = complete(extra_body={"structured_outputs": {"regex": "(yes|no)!"}}, max_tokens=20)
    assert found.choices[0].text in ("yes!", "no!")
