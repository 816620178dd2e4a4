"""Who may use a server, what a browser is told, what is logged and counted."""

import pytest
from serving import served

from megatron.apps.generation.server.app import Access

BODY = {"prompt": "a secret", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def locked():
    """A server with a key."""
    access = Access("the key", "0.0.0.0", ["https://friend.example"])
    with served(access=access, log_prompts=True) as found:
        yield found


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("the ke"), bearer("the key2"), {"Authorization": "Basic the key"}],
)
def test_without_the_key(locked, headers):
    with locked.client(headers=headers) as client:
        for path in ("/v1/completions", "/chat/completions", "/nothing"):
            response = client.post(path, json=BODY)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert list(client.put("/api", json={}).json()) == ["message"]
        assert client.get("/metrics").status_code == client.get("/v1/models").status_code == 401


def test_with_the_key(locked):
    with locked.client(headers=bearer("the key")) as client:
        assert client.post("/v1/completions", json=BODY).is_success
        assert client.get("/metrics").is_success


def test_health_and_page_need_no_key(locked):
    with locked.client() as client:
        assert client.get("/health").is_success
        assert client.get("/").is_success


def test_a_body_is_not_read_before_the_key_is_known(locked):
    with locked.client() as client:
        assert client.post("/v1/completions", content=b"x" * 5_000_000).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://friend.example"}, 200),
        ({"Origin": "https://enemy.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "anything.example"}, 200),
        ({"Host": "a.example", "Origin": "https://a.example"}, 200),
    ],
)
def test_pages_of_other_sites_with_a_key(locked, headers, status):
    with locked.client(headers={**bearer("the key"), **headers}) as client:
        response = client.get("/v1/models")
    assert response.status_code == status
    allowed = response.headers.get("access-control-allow-origin")
    friend = headers.get("Origin") == "https://friend.example"
    assert allowed == ("https://friend.example" if friend else None)


def test_a_page_that_may_ask_can_read_refusals(locked):
    with locked.client(headers={"Origin": "https://friend.example"}) as client:
        response = client.get("/v1/models")
    assert response.status_code == 401 and response.headers["access-control-allow-origin"]


def test_preflight(locked):
    asked = {
        "Origin": "https://friend.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with locked.client() as client:
        assert client.options("/v1/completions", headers=asked).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://enemy.example"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ],
)
def test_pages_of_other_sites_without_a_key(client, headers, status):
    assert client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/", "/health", "/nothing", "/v1/models"])
def test_security_headers(client, path):
    headers = client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_nothing_describes_the_api_with_scripts_from_elsewhere(client):
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


def test_a_line_for_each_request():
    with served() as server, server.client() as client:
        client.post("/v1/completions", json=BODY)
        client.put("/api", json={"prompts": ["a secret"], "tokens_to_generate": 1})
        client.get("/health?a=secret")
        client.get("/%0aPOST")
    assert [line.split(" ")[:3] for line in server.lines] == [
        ["POST", "/v1/completions", "200"],
        ["PUT", "/api", "200"],
        ["GET", "/health", "200"],
        ["GET", "/\\nPOST", "404"],
    ]
    assert "8 + 2 tokens" in server.lines[0]
    assert not any("secret" in line for line in server.lines)


def test_prompts_are_logged_where_a_flag_asks_for_it(locked):
    with locked.client(headers=bearer("the key")) as client:
        for no_log in (False, True):
            del locked.lines[:]
            body = {"prompts": ["a secret"], "tokens_to_generate": 1, "no_log": no_log}
            client.put("/api", json=body)
            assert any("a secret" in line for line in locked.lines) is not no_log


def test_metrics():
    with served() as server, server.client() as client:
        client.post("/v1/completions", json={**BODY, "max_tokens": 5})
        client.post("/v1/completions", json={})
        client.get("/some/path")
        text = client.get("/metrics").text
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    counted = 'megatron_requests_total{endpoint="/v1/completions",status="%d"}'
    assert float(numbers[counted % 200]) == float(numbers[counted % 400]) == 1
    assert float(numbers['megatron_requests_total{endpoint="other",status="404"}']) == 1
    assert float(numbers["megatron_time_to_first_token_seconds_count"]) == 1
    assert float(numbers["megatron_inter_token_seconds_count"]) == 4
    assert float(numbers["megatron_new_tokens_total"]) == 5
    assert float(numbers["megatron_prompt_tokens_total"]) == 8
    assert float(numbers["megatron_running"]) == float(numbers["megatron_waiting"]) == 0
    assert float(numbers["megatron_pages_free"]) > 0
    assert "megatron_prefix_hit_tokens_total" in numbers
    assert float(numbers["megatron_draft_tokens_total"]) == 0
    assert float(numbers["megatron_accepted_tokens_total"]) == 0
