"""tools/run_text_generation_server.py as people start it: on several processes, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed (the extra serve)")

import httpx  # noqa: E402

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
sys.path.insert(0, str(ROOT / "tests/distributed"))

from harness_parts import write_model  # noqa: E402

PROGRAM = "tools/run_text_generation_server.py"
LAYOUTS = {
    "one": [sys.executable, PROGRAM],
    "tp2": [
        *(str(BIN / "torchrun"), "--nproc_per_node", "2", PROGRAM),
        *("--tensor-model-parallel-size", "2"),
    ],
    "pp2": [
        *(str(BIN / "torchrun"), "--nproc_per_node", "2", PROGRAM),
        *("--pipeline-model-parallel-size", "2"),
    ],
}
PATIENCE = 120
pytestmark = pytest.mark.proof


def environment():
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "compat")])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random GPT-2."""
    folder = tmp_path_factory.mktemp("model") / "gpt"
    write_model(folder, ["Hello world, one two three. " * 20])
    return folder


class Program:
    """A started server; ``main`` is the process that answers, ``others`` the other ranks."""

    def __init__(self, process, output):
        self.process, self._output = process, output
        found = self.wait_for(r"is served at (http://127.0.0.1:(\d+))")
        self.url = found[1]
        ranks = psutil.Process(process.pid).children() or [psutil.Process(process.pid)]
        self.main = next(rank for rank in ranks if self._serves(rank, found[2]))
        self.others = [rank for rank in ranks if rank.pid != self.main.pid]

    @staticmethod
    def _serves(rank, port):
        return any(c.laddr.port == int(port) for c in rank.net_connections("tcp"))

    def output(self):
        return self._output.read_text()

    def wait_for(self, pattern):
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.output())):
            assert self.process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.05)
        return found

    def ended(self):
        """The exit status; all processes are gone."""
        status = self.process.wait(PATIENCE)
        assert not psutil.wait_procs([self.main, *self.others], 10)[1], "a rank lives on"
        return status

    def client(self):
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)


@contextmanager
def started(layout, model, output, *flags):
    command = [*LAYOUTS[layout], "--load", str(model), "--port", "0", *flags]
    with output.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield Program(process, output)
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
        process.wait()


def refused(*flags):
    """The one line of a server that does not start."""
    ran = subprocess.run(
        [sys.executable, PROGRAM, *map(str, flags)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    return ran.stderr.strip().splitlines()[-1]


BODY = {"prompts": ["Hello world", "one"], "tokens_to_generate": 6, "top_k": 1, "logprobs": True}
STREAM = {"prompt": "Hello", "max_tokens": 60, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What one process answers."""
    with started("one", model, tmp_path_factory.mktemp("one") / "log") as program:
        with program.client() as client:
            yield client.put("/api", json=BODY).json()
        program.main.send_signal(signal.SIGTERM)
        assert program.ended() == 0


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_processes_answer_as_one(layout, model, alone, tmp_path):
    with started(layout, model, tmp_path / "log") as program, program.client() as client:
        answer = client.put("/api", json=BODY).json()
        assert answer["text"] == alone["text"]
        for ours, theirs in zip(answer["logprobs"], alone["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        curl = (
            f"curl '{program.url.replace('127.0.0.1', 'localhost')}/api' -X 'PUT' "
            "-H 'Content-Type: application/json; charset=UTF-8' "
            """-d '{"prompts":["Hello world"], "tokens_to_generate":1}'"""
        )
        ran = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout)["text"][0].startswith("Hello world")
        program.process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
        program.process.wait(PATIENCE)
        assert "all requests have ended" in program.output()


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_sigterm_lets_requests_end(layout, model, tmp_path):
    with started(layout, model, tmp_path / "log") as program, program.client() as client:
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()
            next(lines)
            program.main.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert program.ended() == 0


def test_ctrl_c_reaches_all_processes(model, tmp_path):
    with started("tp2", model, tmp_path / "log") as program:
        os.killpg(program.process.pid, signal.SIGINT)
        program.process.wait(PATIENCE)
        assert not psutil.wait_procs([program.main, *program.others], 10)[1]
        assert "all requests have ended" in program.output()


def test_a_second_signal_ends_it_now(model, tmp_path):
    with (
        started("one", model, tmp_path / "log") as program,
        program.client() as client,
        ExitStack() as streams,
    ):
        for _ in range(12):
            asked = client.stream("POST", "/v1/completions", json={**STREAM, "n": 128})
            streams.enter_context(asked)
        program.main.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        program.main.send_signal(signal.SIGTERM)
        assert program.ended() == 128 + signal.SIGTERM


def test_a_rank_that_dies(model, tmp_path):
    with started("tp2", model, tmp_path / "log") as program:
        program.others[0].kill()
        with pytest.raises(httpx.HTTPError), program.client() as client:
            for _ in range(1000):
                client.post("/v1/completions", json={"prompt": "Hello"}).raise_for_status()
        assert program.ended() != 0


def test_an_engine_that_fails_says_so(model, tmp_path):
    """Without a launcher that ends all ranks when one has died."""
    with started("tp2", model, tmp_path / "log") as program, program.client() as client:
        program.process.send_signal(signal.SIGSTOP)
        program.others[0].kill()
        response = client.post("/v1/completions", json={"prompt": "Hello"})
        assert response.status_code == 503
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        program.wait_for("error: generation has failed, and the server ends: ")
        end = time.monotonic() + 10
        while program.main.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.05)
        program.process.send_signal(signal.SIGCONT)
        assert program.ended() != 0


def test_what_cannot_be_served(model, tmp_path):
    from transformers import BertConfig, BertForPreTraining

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=64, vocab_size=120)
    BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(115))]
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words))
    vocab = ["--vocab-file", tmp_path / "bert" / "vocab.txt"]
    line = refused("--port", 0, "--load", tmp_path / "bert", *vocab)
    assert f"--load {tmp_path / 'bert'}" in line and "family bert does not generate" in line
    assert "another" in line
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused("--port", 0, "--load", tmp_path / "empty")
    assert "--load" in refused()
    with started("one", model, tmp_path / "log") as program:
        port = program.url.rpartition(":")[2]
        line = refused("--load", model, "--port", port)
        assert f"--port {port}" in line and "another" in line
