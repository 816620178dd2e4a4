"""Flags of the server: what is refused, and with which words."""

import contextlib
import signal
import socket

import pytest

from megatron.apps.generation.server import command
from megatron.apps.generation.server.config import KEY_VARIABLE, ServerConfig, is_loopback
from megatron.apps.generation.server.listening import listening_socket
from megatron.config import ConfigError
from megatron.run.run import RunToolParser


def parse(*argv):
    return RunToolParser(ServerConfig, None).parse(list(argv))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_defaults():
    config, _ = parse("--load", "x")
    assert (config.host, config.port, config.key) == ("127.0.0.1", 5000, None)
    assert (config.max_tokens_to_oom, config.temperature, config.top_p, config.top_k) == (
        *(12000, 1.0, 0.0),
        0,
    )
    assert config.notes == []


def test_the_documented_flags(tmp_path):
    """Of Megatron-LM's README and script, together with flags of training."""
    argv = "--tensor-model-parallel-size 2 --num-layers 24 --hidden-size 1024 --load c --fp16 "
    argv += "--num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type "
    argv += "GPT2BPETokenizer --micro-batch-size 1 --seq-length 1024 --out-seq-length 1024 "
    argv += "--temperature 1.0 --vocab-file v --merge-file m --top_p 0.9 --seed 42 "
    argv += "--inference-batch-times-seqlen-threshold 512 --pipeline-model-parallel-size 1"
    config, settings = parse(*argv.split())
    assert config.top_p == 0.9 and settings["seed"].value == 42
    assert [note.split(" changes nothing: ")[0] for note in config.notes] == [
        "--out-seq-length 1024",
        "--inference-batch-times-seqlen-threshold 512",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 .* --api-key"),
        ("--host ::", "--host :: .* --api-key"),
        ("--host 0.0.0.0 --allow-origin *", "--api-key"),
        ("--allow-origin *", "--allow-origin .* --api-key"),
        ("--allow-origin https://a.example/", "--allow-origin https://a.example/ is not a site"),
        ("--allow-origin a.example", "--allow-origin a.example is not a site"),
        ("--api-key a --api-key-file b", "give one of them"),
        ("--api-key-file /nowhere/key", "--api-key-file /nowhere/key cannot be read: No such file"),
        ("--api-key é", "printable ASCII"),
        ("--port 70000", r"--port 70000 must be in \[0, 65535\]"),
        ("--temperature 0", "--temperature 0.0 must be in"),
        ("--top_p 1.5", r"--top_p 1.5 must be in \[0, 1\]"),
        ("--top_k 1001", "--top_k 1001 must be in"),
        ("--top_k 5 --top_p 0.5", "give one of them"),
        ("--max-batch-size 0", "--max-batch-size 0 must be positive"),
        ("--max-batch-size 64 --max-num-batched-tokens 64", "--max-num-batched-tokens 64"),
        ("--request-timeout 0", "--request-timeout 0.0 must be positive"),
    ],
)
def test_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse("--load", "x", *argv.split())


def test_a_value_that_is_not_a_number(capsys):
    with pytest.raises(SystemExit):
        parse("--load", "x", "--port", "http")
    assert "--port" in capsys.readouterr().err


def test_keys(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("from a file\n")
    assert parse("--api-key-file", str(tmp_path / "key"))[0].key == "from a file"
    monkeypatch.setenv(KEY_VARIABLE, "from outside")
    assert parse("--host", "0.0.0.0")[0].key == "from outside"
    assert parse("--api-key", "given")[0].key == "given"
    (tmp_path / "key").write_text("")
    with pytest.raises(ConfigError, match="not be empty|not empty"):
        parse("--api-key-file", str(tmp_path / "key"))


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_that_is_taken():
    with listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: another program listens there"):
            listening_socket("127.0.0.1", port)
    listening_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such name"])
def test_an_address_that_is_not_here(host):
    with pytest.raises(ConfigError, match=f"--host {host}"):
        listening_socket(host, 0)


def test_a_closed_port_can_be_used_again():
    with listening_socket("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        client.close()
    listening_socket("127.0.0.1", port).close()


def test_a_rank_that_still_loads_ends_with_the_main_one(monkeypatch):
    """A signal ends it at once while it loads, not after the timeout."""
    handled = []

    def opened(*_):
        handled.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
        return contextlib.nullcontext()

    monkeypatch.setattr(command, "is_main_process", lambda: False)
    monkeypatch.setattr(command, "start_processes", lambda *_: 2)
    monkeypatch.setattr(command, "opened_runner", opened)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        command.run_server(None, ["--load", "checkpoints"])
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert handled == [signal.SIG_DFL] * 2
