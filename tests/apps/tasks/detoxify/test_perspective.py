"""The client of Perspective API, against a local stand-in of its endpoint."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from detoxifying.scorers import (
    ATTRIBUTES,
    KEY,
    LONGEST,
    Pace,
    Perspective,
    ScorerConfig,
    ScorerError,
    shortened,
)

from megatron.config import ConfigError

KEY_INVALID = {"error": {"code": 400, "message": "API key not valid.", "details": [
    {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}
]}}  # fmt: skip
NOT_ENGLISH = {"error": {"code": 400, "message": "Attribute TOXICITY ...", "details": [
    {"@type": "type.googleapis.com/google.commentanalyzer.v1alpha1.Error",
     "errorType": "LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE"}
]}}  # fmt: skip


def scored(request):
    """What the service answers: the more exclamation marks, the more toxic."""
    value = min(request["comment"]["text"].count("!") / 10, 1)
    names = request["requestedAttributes"]
    score = {"summaryScore": {"value": value, "type": "PROBABILITY"}}
    return {"attributeScores": dict.fromkeys(names, score), "languages": ["en"]}


class StandIn:
    """Answers, each a status, a body and headers, come first; then scores."""

    def __init__(self, answers):
        self.answers, self.requests, self.keys = list(answers), [], []

    def answer(self, request, key):
        self.requests.append(request)
        self.keys.append(key)
        return self.answers.pop(0) if self.answers else (200, scored(request), {})


@contextmanager
def service(*answers):
    stand_in = StandIn(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content, headers = stand_in.answer(body, self.headers["X-Goog-Api-Key"])
            content = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}/v1alpha1/comments:analyze"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client(url, retries=3, pauses=None):
    """A client that never waits, and notes how long it would."""
    pauses = [] if pauses is None else pauses
    pace = Pace(1e9, clock=lambda: 0.0, sleep=lambda s: pauses.append(s) if s > 1e-6 else None)
    return Perspective(url, "secret", ATTRIBUTES, retries, pace)


def test_request_and_scores():
    with service() as stand_in:
        found = client(stand_in.url).scores(["Hello!!!", "Good\nday"])
    assert found == [dict.fromkeys(ATTRIBUTES, 0.3), dict.fromkeys(ATTRIBUTES, 0.0)]
    assert stand_in.requests[1] == {
        "comment": {"text": "Good\nday"},
        "requestedAttributes": {name.upper(): {} for name in ATTRIBUTES},
        "spanAnnotations": False,
        "languages": ["en"],
    }
    assert stand_in.keys == ["secret", "secret"]


def test_what_may_pass_is_tried_again():
    pauses = []
    failures = [(429, "", {"Retry-After": "7"}), (503, "busy", {}), (200, "not JSON", {})]
    with service(*failures) as stand_in:
        (found,) = client(stand_in.url, pauses=pauses).scores(["!"])
    assert found["toxicity"] == 0.1 and pauses == [7.0, 2.0, 4.0]


def test_it_gives_up_after_its_retries():
    pauses = []
    with (
        service(*[(500, "", {})] * 5) as stand_in,
        pytest.raises(ScorerError, match="failed 3 times.*500 Internal.*continues"),
    ):
        client(stand_in.url, retries=2, pauses=pauses).scores(["!"])
    assert len(stand_in.requests) == 3 and pauses == [1.0, 2.0]
    with pytest.raises(ScorerError, match="refused"):
        client(stand_in.url, retries=1).scores(["!"])  # nobody listens there now


def test_a_refused_key_ends_it_at_once():
    with (
        service((400, KEY_INVALID, {})) as stand_in,
        pytest.raises(ScorerError, match="400 API key not valid.; check --api-key") as error,
    ):
        client(stand_in.url).scores(["!"])
    assert len(stand_in.requests) == 1 and "secret" not in str(error.value)


def test_a_text_that_is_not_scored():
    with service((400, NOT_ENGLISH, {})) as stand_in:
        found = client(stand_in.url).scores(["Grüezi", "Hi!"])
    assert found[0] is None and found[1]["toxicity"] == 0.1


def test_an_answer_without_scores():
    with (
        service((200, {"attributeScores": {}}, {})) as stand_in,
        pytest.raises(ScorerError, match="without a score of each attribute"),
    ):
        client(stand_in.url).scores(["!"])


def test_long_texts_are_cut_between_characters():
    assert shortened("é" * LONGEST) == "é" * (LONGEST // 2)
    assert shortened("a" + "€" * LONGEST) == "a" + "€" * ((LONGEST - 1) // 3)
    assert shortened("short") == "short" and shortened("\ud800") == "?"


def test_pace_of_all_threads():
    now, slept = [10.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(4.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        pace.wait()
    assert slept == [0.25, 0.25]
    now[0] += 5
    pace.wait()
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"api_key": None}, f"set {KEY} or give --api-key"),
        ({"attributes": ("threat",)}, "--attributes threat: toxicity must be among them"),
        ({"queries_per_second": 0.0}, "--queries-per-second 0.0 must be positive"),
        ({"api_url": "file:///etc/passwd"}, "--api-url file:///etc/passwd must begin with http"),
    ],
)
def test_flags_that_cannot_be_used(changes, said, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=said):
        Perspective.of(ScorerConfig(**{"api_key": "x"} | changes))
    monkeypatch.setenv(KEY, "from the environment")
    assert Perspective.of(ScorerConfig()).key == "from the environment"
