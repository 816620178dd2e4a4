"""Uploads to a stand-in of the hub, and loading from it: the real client speaks to a server on this
machine."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub.cli.hf import app as hf
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.reader import CheckpointReader
from megatron.config import ConfigError
from megatron.formats.conversion.output import check_hub, push
from megatron.formats.huggingface.export import write_model
from megatron.tokenizer.plain import NullTokenizer

TOKEN = "hf_standin"
COMMIT = 40 * "a"


class Hub(ThreadingHTTPServer):
    """Repositories in memory, of what the client calls when it makes one, uploads a folder, and
    downloads single files.

    Attributes:
        repositories: visibility and files by name.
        failure: status that every request is answered with; None for none.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.large, self.requests, self.failure = {}, {}, [], None

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, content, status=200, headers=()):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def refused(self):
        hub = self.server
        hub.requests.append((self.command, self.path))
        status = hub.failure
        if status is None and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 401
        if status is not None:
            self.body()
            self.answer({"error": "Invalid username or password."}, status)
        return status is not None

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.refused():
            return
        path = self.path.split("?")[0].removeprefix("/")
        name, _, file = path.removeprefix("api/models/").partition("/resolve/")
        repository = self.server.repositories.get(name)
        content = repository and repository["files"].get(file.partition("/")[2])
        if repository is not None and path.startswith("api/models/"):
            siblings = [{"rfilename": known} for known in repository["files"]]
            private = repository["private"]
            self.answer({"id": name, "sha": COMMIT, "siblings": siblings, "private": private})
        elif content is None:
            self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self.answer(content, headers={"ETag": hashlib.sha256(content).hexdigest()})

    def do_PUT(self):  # a large file, to the address that the batch request was given
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        if self.refused():
            return
        hub, body = self.server, self.body()
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            expected = json.loads(body)
            name = f"{expected['organization'] or 'me'}/{expected['name']}"
            known = name in hub.repositories
            private = expected.get("visibility") == "private" or expected.get("private") is True
            hub.repositories.setdefault(name, {"private": private, "files": {}})
            self.answer({"url": f"{hub.address}/{name}"}, 409 if known else 200)
        elif path == "/api/validate-yaml":  # of the model card that transformers writes
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                each | {"actions": {"upload": {"href": f"{hub.address}/large/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            self.commit(hub.repositories[name]["files"], body.decode().splitlines())
            self.answer({"commitUrl": f"{hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer({"error": f"not in this stand-in: {path}"}, 404)

    def commit(self, files, lines):
        for line in map(json.loads, lines):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.server.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    # What HF_ENDPOINT sets when the client is imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.address)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    address = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
    # The stand-in takes large files by git LFS; Xet's servers are another protocol.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path):
    files = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 40}
    (tmp_path / "hf").mkdir()
    for name, content in files.items():
        (tmp_path / "hf" / name).write_bytes(content)
    return tmp_path / "hf"


@pytest.mark.parametrize("private", [True, False])
def test_everything_arrives(private, hub, folder):
    assert push(folder, "someone/model", private) == f"{hub.address}/someone/model"
    repository = hub.repositories["someone/model"]
    assert repository["private"] is private
    assert repository["files"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(hub.large) == 1  # the weights did not go into the commit itself


def test_a_repository_that_is_there_gets_a_commit(hub, folder):
    push(folder, "someone/model", False)
    (folder / "config.json").write_bytes(b"{}")
    push(folder, "someone/model", False)
    assert hub.repositories["someone/model"]["files"]["config.json"] == b"{}"


def test_a_public_repository_gets_nothing_unless_asked(hub, folder):
    """Creating a repository that exists, as a private one, leaves it public."""
    hub.repositories["someone/model"] = {"private": False, "files": {}}
    with pytest.raises(OSError, match="--push-to-hub someone/model: .* is public.* --public"):
        push(folder, "someone/model", True)
    assert not hub.repositories["someone/model"]["files"] and not hub.large


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("token", "failure", "message"),
    [
        ("hf_wrong", None, "401 .*hf auth login"),
        (TOKEN, 403, "403 .*hf auth login"),
        (TOKEN, 400, "400"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    private, token, failure, message, hub, folder, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.failure = failure
    with pytest.raises(OSError, match=message) as error:
        push(folder, "someone/model", private)
    text = str(error.value)
    assert len(text.splitlines()) == 1 and hub.address in text
    flag = " --private" if private else ""
    assert f"`hf upload someone/model {folder}{flag}`" in text and len(list(folder.iterdir())) == 2


def test_no_network_is_one_line(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="--push-to-hub someone/model: http://127.0.0.1:9: ") as error:
        push(folder, "someone/model", False)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a/b/c", "a//b", "-x", "x--y", "x.git"])
def test_names_are_checked_before_anything_else(name):
    with pytest.raises(ConfigError, match=f"--push-to-hub {name}: "):
        check_hub(name)
    check_hub("someone/model")


@pytest.fixture
def exported(tmp_path, gpt_config, random_gpt, write_checkpoint):
    """Makes an export, with a tokenizer."""

    def make(llama):
        config = gpt_config(llama=llama)
        written = write_checkpoint(tmp_path / "save", config, random_gpt(config), NullTokenizer(60))
        (tmp_path / "export").mkdir()
        write_model(CheckpointReader(written), tmp_path / "export", "float32", 10**9)
        return tmp_path / "export"

    return make


def by_our_flag(export):
    push(export, "someone/model", False)


def by_the_posts_calls(export):
    AutoModelForCausalLM.from_pretrained(export).push_to_hub("someone/model")
    AutoTokenizer.from_pretrained(export).push_to_hub("someone/model")


def by_the_clients_command(export):
    with pytest.raises(SystemExit) as end:
        hf(["upload", "someone/model", str(export)])
    assert not end.value.code


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("upload", [by_our_flag, by_the_posts_calls, by_the_clients_command])
def test_what_was_uploaded_loads_from_the_hub(upload, llama, hub, exported, tmp_path):
    export = exported(llama)
    upload(export)
    options = {"cache_dir": tmp_path / "cache", "token": TOKEN}
    actual = AutoModelForCausalLM.from_pretrained("someone/model", **options)
    tokens = AutoTokenizer.from_pretrained("someone/model", **options)(
        "3 7 59 2", return_tensors="pt"
    )
    expected = AutoModelForCausalLM.from_pretrained(export)
    assert tokens["input_ids"].tolist() == [[3, 7, 59, 2]]
    assert torch.equal(actual(**tokens).logits, expected(**tokens).logits)
    assert any(path.startswith("/someone/model/resolve/") for _, path in hub.requests)
