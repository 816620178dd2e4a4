"""Clients of a text generation server, most of them well-behaved, the others in every way not.

``python tests/e2e/soaking.py PORT PID --requests 10000`` asks a server that runs and prints what
`Soak.run` found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

WORDS = ("Hello", "world", "one", "two", "three", "one two", "Hello world, one")
COMPLETIONS, CHAT, API = "/v1/completions", "/v1/chat/completions", "/api"
PATIENCE = 240


class Asked(NamedTuple):
    """A request: what is sent, and whether it is right."""

    path: str
    body: Any
    method: str = "POST"


def good(number: int) -> Asked:
    """A request that gets the same answer every time."""
    draw = random.Random(number)
    prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))
    new, seed = draw.randint(1, 12), draw.randrange(2**31)
    kind = number % 8
    if kind == 0:
        body: dict[str, Any] = {"prompts": [prompt, "one"], "tokens_to_generate": new}
        return Asked(API, body | {"top_k": 1, "logprobs": True}, "PUT")
    if kind == 1:
        body = {"prompts": [prompt], "tokens_to_generate": new, "top_p": 0.9, "random_seed": seed}
        return Asked(API, body | {"logprobs": True, "top_p_decay": 0.9}, "PUT")
    if kind == 2:
        body = {"prompts": [prompt], "tokens_to_generate": new, "beam_width": draw.randint(1, 4)}
        return Asked(API, body | {"stop_token": 0, "length_penalty": 1}, "PUT")
    if kind in (3, 4):
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_completion_tokens": new, "seed": seed}
        body |= {"logprobs": True, "top_logprobs": 3, "stream": kind == 4}
        return Asked(CHAT, body)
    body = {"prompt": prompt, "max_tokens": new, "seed": seed, "logprobs": draw.randint(0, 4)}
    body |= {"temperature": draw.choice([0, 0.7, 1.3]), "min_p": 0.01, "stream": kind == 7}
    if kind == 6:
        body |= {"n": 2, "echo": True, "stop": ["tw"], "frequency_penalty": 0.5}
    return Asked(COMPLETIONS, body)


BASES = {
    API: {"prompts": ["Hello"], "tokens_to_generate": 4, "top_p": 0.9},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}
HUGE = "one two " * 5000
NO_INTEGER: tuple[Any, ...] = ("x", [], {}, True, 1.5, -2, 10**30)
NO_NUMBER: tuple[Any, ...] = ("x", [], {}, True, -5, 1e6)
NO_FLAG: tuple[Any, ...] = ("yes", 1, [1], {"a": 1})
NO_MESSAGES: tuple[Any, ...] = (
    "x", [], [5], [{}], {}, 7, [{"role": "x", "content": "a"}], [{"role": "user"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": HUGE}], [{"role": "user", "content": "a", "more": 1}],
)  # fmt: skip
OF_BOTH: dict[str, tuple[Any, ...]] = {
    "model": (5, "another", []),
    "n": ("x", 0, -1, 129, True),
    "best_of": ("x", 7, True),
    "temperature": ("x", -1, 3, True, []),
    "top_p": ("x", -1, 2, True),
    "top_k": NO_INTEGER,
    "min_p": NO_NUMBER,
    "presence_penalty": NO_NUMBER,
    "frequency_penalty": NO_NUMBER,
    "repetition_penalty": ("x", 0, 101, True),
    "seed": ("x", -1, 2**63, True, 1.5),
    "stream": NO_FLAG,
    "stop": (5, [5], [""], ["a"] * 17, {}),
    "stop_token_ids": ("x", [-1], [1.5], [10**9]),
    "ignore_eos": NO_FLAG,
    "logit_bias": ("x", {"a": 1}, {"1": 101}, {"1": "x"}, {"99999": 1}, [1]),
    "stream_options": ("x", {"include_usage": True}),
    "response_format": ("x", {}, {"type": "xml"}, {"type": "json_schema"}),
    "structured_outputs": ("x", {}, {"regex": 5}, {"regex": "a", "json": {}}),
    "guided_regex": (5, "("),
    "guided_json": (5, "{", [1]),
    "no_such_field": (1, "x", {}),
}
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    API: {
        "prompts": ("x", [], [1], [None], ["a"] * 129, {}, None, [""], [HUGE], 5),
        "tokens_to_generate": ("5", [3], {}, -1, True, 1.5, None, 10**9),
        "temperature": ("x", 0, -1, 101, True, [], None),
        "top_k": ("x", -1, 1001, True, 1.5, 5),
        "top_p": ("x", -0.1, 1.1, True, []),
        "top_p_decay": ("x", -1, 2, True),
        "top_p_bound": ("x", 0, 0.95, True),
        **dict.fromkeys(("logprobs", "add_BOS", "stop_on_eol", "stop_on_double_eol"), NO_FLAG),
        **dict.fromkeys(("prevent_newline_after_colon", "no_log"), NO_FLAG),
        "random_seed": ("x", -1, True, 1.5),
        "beam_width": ("x", 0, True, 1.5, 10**6),
        "stop_token": ("x", 1.5, [], True),
        "length_penalty": ("x", [], True),
        "max_len": (5,),
        "sentences": (["a"],),
        "no_such_field": (1, "x", {}),
    },
    COMPLETIONS: {
        **OF_BOTH,
        "prompt": (5, {}, [], [1.5], [-1], [10**9], ["a", 5], HUGE, [True], None),
        "max_tokens": ("x", -1, True, 1.5, [], 10**9),
        "logprobs": ("x", -1, 21, True),
        "echo": NO_FLAG,
        "suffix": ("x",),
        "use_beam_search": (True,),
        "min_tokens": (3,),
    },
    CHAT: {
        **OF_BOTH,
        "messages": NO_MESSAGES,
        "logprobs": NO_FLAG,
        "top_logprobs": ("x", -1, 21, True, 3),
        "max_completion_tokens": ("x", 0, True, 10**9),
        "tools": ([{"type": "function"}],),
        "audio": ({"voice": "x"},),
        "modalities": (["audio"],),
        "reasoning_effort": ("low",),
    },
}
"""By path and field what is not a value of it, next to the values of `BASES`."""


def wrong_field(draw: random.Random) -> bytes:
    """One of `WRONG`."""
    path = draw.choice(list(WRONG))
    name = draw.choice(list(WRONG[path]))
    body = BASES[path] | {name: draw.choice(WRONG[path][name])}
    return request("PUT" if path == API else "POST", path, json.dumps(body).encode())


def broken_json(draw: random.Random) -> bytes:
    """A body that is not a JSON object."""
    path = draw.choice(list(BASES))
    whole = json.dumps(BASES[path]).encode()
    at = draw.randrange(1, len(whole))
    body = draw.choice(
        [
            whole[:at],
            whole[:at] + draw.choice([b"\xff", b"\x00", b"}", b"{", b'"', b"\\"]) + whole[at + 2 :],
            draw.randbytes(30),
            b"",
            b"[" * draw.choice([10, 2000, 200_000]),
            b"[" * 2000 + b"]" * 2000,
            b'{"prompt": ' + b'{"a": ' * 100 + b"1" + b"}" * 101,
            draw.choice([b"[]", b"3", b'"x"', b"null", b"NaN", b'{"prompt": NaN}', b"'a'"]),
            whole + whole,
        ]
    )
    if _is_object(body):
        body = whole[:-1]
    return request("PUT" if path == API else "POST", path, body)


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict) and b"{" * 2 not in body and b'{"a"' not in body
    except (ValueError, RecursionError):
        return False


def wrong_place(draw: random.Random) -> bytes:
    """Another method or path."""
    body = json.dumps(BASES[COMPLETIONS]).encode()
    method, path = draw.choice(
        [("GET", API), ("DELETE", COMPLETIONS), ("POST", "/v2/completions"), ("PATCH", CHAT)]
        + [("GET", "/../../etc/passwd"), ("GET", "/page/..%2f..%2fsetup.py"), ("PUT", "/metrics")]
    )
    return request(method, path, body)


def garbage(draw: random.Random) -> bytes:
    """What is no HTTP."""
    long = b"a" * 200_000
    junk = bytes(draw.choices(range(33, 127), k=40))
    return draw.choice(
        [
            junk + b"\r\n\r\n",
            b"\x16\x03\x01" + draw.randbytes(40) + b"\r\n\r\n",
            b"PUT /api HTTP/9.9\r\nHost: x\r\n\r\n",
            b"PUT /api HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: abc\r\n\r\n",
            b"PUT /api HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
            b"PUT /api HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"PUT /api HTTP/1.1\r\nHost: 127.0.0.1\r\n" + junk.replace(b":", b"") + b"\r\n\r\n",
            b"PUT /api HTTP/1.1\r\nHost: 127.0.0.1\r\nA\x00b: c\r\n\r\n",
            b"PUT /api HTTP/1.1\r\nHost: [\r\nContent-Length: 2\r\n\r\n{}",
            b"GET /" + long + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA: " + long + b"\r\n\r\n",
        ]
    )


def huge(draw: random.Random) -> bytes:
    """A body of megabytes."""
    text = "one two " * draw.choice([200_000, 700_000])
    path = draw.choice([API, COMPLETIONS])
    body = {"prompts": [text], "tokens_to_generate": 1} if path == API else {"prompt": text}
    return request("PUT" if path == API else "POST", path, json.dumps(body).encode())


MALFORMED = (
    *((wrong_field,) * 50), *((broken_json,) * 25), *((wrong_place,) * 8), *((garbage,) * 14),
    *((huge,) * 3),
)  # fmt: skip


def request(method: str, path: str, body: bytes, *headers: str) -> bytes:
    """HTTP on a connection of its own."""
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


class Answer(NamedTuple):
    """What came back; status 0 where the connection was closed without an answer."""

    status: int
    body: bytes


async def exchange(port: int, sent: bytes, pieces: int = 1, pause: float = 0.0) -> Answer:
    """Sends bytes, in pieces with pauses, and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(_send(writer, sent, pieces, pause))
    found = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), PATIENCE):
            found += piece
    except ConnectionError:
        pass  # it has closed before it has read all
    finally:
        sending.cancel()
        writer.close()
    return parsed(found)


async def _send(writer: asyncio.StreamWriter, sent: bytes, pieces: int, pause: float) -> None:
    size = -(-len(sent) // pieces)
    with contextlib.suppress(ConnectionError):
        for begin in range(0, len(sent), size):
            writer.write(sent[begin : begin + size])
            await writer.drain()
            await asyncio.sleep(pause)


def parsed(found: bytes) -> Answer:
    """An HTTP answer."""
    head, _, body = found.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Answer(0, found)
    if b"transfer-encoding: chunked" in head.lower():
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return Answer(int(head.split(b" ", 2)[1]), body)


def content(answer: Answer) -> Any:
    """What of an answer is the same every time; of a stream its events put together."""
    if not answer.body.startswith(b"data: "):
        return _plain(json.loads(answer.body))
    lines = [line for line in answer.body.decode().split("\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    choices: dict[int, list[Any]] = {}
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
            text, scores, ends = choices.setdefault(choice["index"], [[], [], []])
            text.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
            found = choice.get("logprobs") or {}
            scores += found.get("content") or found.get("token_logprobs") or []
            ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return {index: ["".join(text), scores, ends] for index, (text, scores, ends) in choices.items()}


def _plain(found: Any) -> Any:
    for name in ("id", "created"):
        found.pop(name, None)
    found.get("usage", {}).pop("prompt_tokens_details", None)
    return found


def reason(answer: Answer) -> str:
    """What a refusal says."""
    try:
        found = json.loads(answer.body)
    except ValueError:
        return answer.body.decode(errors="replace")
    error = found.get("error", found)
    return str(error.get("message") or error.get("detail") or "")


@dataclass
class Soak:
    """A server under load.

    Attributes:
        distinct: different good requests; each is asked alone first.
        counts: of what was sent.
        faults: answers that were wrong.
    """

    port: int
    pid: int
    distinct: int = 96
    at_once: int = 64
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    alone: dict[int, Any] = field(default_factory=dict)

    async def run(self, requests: int) -> dict[str, Any]:
        """Sends requests; says how large the server was after a tenth and at the end."""
        began = time.monotonic()
        for number in range(self.distinct):
            answer = await self._ask(number)
            assert answer.status == 200, answer
            self.alone[number] = content(answer)
        numbers = iter(range(requests))
        warm = requests // 5
        await self._many(numbers, warm)
        before = await self.size()
        await self._many(numbers, requests)
        after = await self.size()
        return {
            "seconds": round(time.monotonic() - began, 1),
            "counts": dict(self.counts),
            "before": before,
            "after": after,
            "faults": self.faults,
        }

    async def size(self) -> dict[str, int]:
        """Of the server's process when it has nothing to do."""
        for _ in range(100):
            metrics = (await exchange(self.port, request("GET", "/metrics", b""))).body.decode()
            values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] != "#")
            busy = [v for k, v in values.items() if "running" in k or "waiting" in k]
            if not any(float(v) for v in busy):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        process = psutil.Process(self.pid)
        return {
            "resident_bytes": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children()),
        }

    async def _many(self, numbers: Any, until: int) -> None:
        async def work() -> None:
            for number in numbers:
                await self._one(number)
                if number + self.at_once >= until:
                    return

        await asyncio.gather(*(work() for _ in range(self.at_once)))

    async def _one(self, number: int) -> None:
        draw = random.Random(number)
        share = draw.random()
        try:
            if share < 0.70:
                await self._good(draw, slow=share < 0.03)
            elif share < 0.74:
                await self._leave(draw)
            elif share < 0.75:
                await self._stall(draw)
            else:
                await self._malformed(draw)
        except (OSError, AssertionError, ValueError, asyncio.TimeoutError) as error:
            self._fault(f"request {number}: {type(error).__name__}: {error}")

    def _fault(self, text: str) -> None:
        self.counts["fault"] += 1
        if len(self.faults) < 20:
            self.faults.append(text[:1500])

    async def _ask(self, number: int, slow: bool = False) -> Answer:
        path, body, method = good(number)
        sent = request(method, path, json.dumps(body).encode())
        return await exchange(self.port, sent, *((8, 0.1) if slow else ()))

    async def _good(self, draw: random.Random, slow: bool) -> None:
        number = draw.randrange(self.distinct)
        answer = await self._ask(number, slow)
        self.counts["good, slow" if slow else "good"] += 1
        if answer.status != 200 or content(answer) != self.alone[number]:
            self._fault(f"{good(number)}: {answer}, alone {self.alone[number]}")

    async def _malformed(self, draw: random.Random) -> None:
        kind = draw.choice(MALFORMED)
        sent = kind(draw)
        answer = await exchange(self.port, sent)
        self.counts[f"malformed, {kind.__name__}"] += 1
        self.counts[f"status {answer.status}"] += 1
        if not 400 <= answer.status < 500 or not reason(answer):
            self._fault(f"{kind.__name__} {sent[:160]!r}: {answer.status} {answer.body[:200]!r}")

    async def _leave(self, draw: random.Random) -> None:
        """Goes away in the middle of the request or of the answer."""
        path, body, method = good(7 + 8 * draw.randrange(self.distinct // 8))
        sent = request(method, path, json.dumps(body | {"max_tokens": 40}).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        half = draw.random() < 0.5
        writer.write(sent[: len(sent) - 20 * half])
        await writer.drain()
        if draw.random() < 0.5 and not half:
            await reader.read(100)
        writer.transport.abort()
        self.counts["malformed, goes away"] += 1

    async def _stall(self, draw: random.Random) -> None:
        """Sends half and waits."""
        sent = request("POST", COMPLETIONS, json.dumps(BASES[COMPLETIONS]).encode())
        half = sent[: draw.randrange(20, len(sent) - 1)]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(half)
        answer = parsed(await asyncio.wait_for(reader.read(), PATIENCE))
        writer.close()
        self.counts["malformed, stalls"] += 1
        self.counts[f"status {answer.status}"] += 1
        if answer.status not in (0, 408):
            self._fault(f"stalls after {half!r}: {answer}")


def main() -> None:
    """Asks a server and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("pid", type=int)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    found = asyncio.run(Soak(options.port, options.pid).run(options.requests))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
