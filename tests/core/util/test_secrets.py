"""Nothing that opens a door is in a record, and nothing else is missing."""

import pytest

from megatron.features.run_record.surroundings import recorded_variables, without_secret_words
from megatron.util.secrets import HIDDEN, Redactor, is_secret, is_secret_variable

KEY = "0123456789abcdef"
ENVIRONMENT = {"WANDB_API_KEY": KEY, "KEY_FOLDER": "/work", "SHORT_TOKEN": "abc", "HOME": "/root"}


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "TOKEN", "--api-key", "MLFLOW_TRACKING_PASSWORD", "db_secret",
     "AWS_SECRET_ACCESS_KEY", "--auth", "TRACKIO_WRITE_TOKEN", "apikey",
     "MASTER_KEY", "NVIDIA_NGC_KEY", "SLURM_JWT"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["--tokenizer-type", "TOKENIZERS_PARALLELISM", "--train-tokens", "--eod-token", "eos_token",
     "--json-keys", "PATH", "NCCL_ALGO", "key_value_heads", "--patience",
     "MASTER_PORT", "NVIDIA_VISIBLE_DEVICES"],
)  # fmt: skip
def test_names_of_others(name):
    assert not is_secret(name)


@pytest.mark.parametrize("name", ["DS_TOKEN", "OMP_KEY", "GITEA_PAT", "EOD_TOKEN"])
def test_variables_of_any_key_or_token(name):
    assert is_secret_variable(name)
    assert Redactor({name: KEY}).text(f"a {KEY} b") == "a *** b"
    assert recorded_variables({name: "a", "DS_TOKENS": "b"}, Redactor({})) == {"DS_TOKENS": "b"}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://me:pw@host/x?a=1", "https://***@host/x?a=1"),
        ("mysql://mlflow:pa/ss+w0rd@db/mlflow", "mysql://***@db/mlflow"),
        ("http://u:p@ss/w@host/x 'http://a:b@c' x@y", "http://***@host/x 'http://***@c' x@y"),
        ("http://a:b/c@d/x,http://e/@f", "http://***@d/x,http://e/@f"),
        ("http://user:8/9@host", "http://***@host"),
        ("https://e.org/@a https://e.org:80/@a http://[::1]:80/@a http://e/a:b@c", None),
        ("https://host/x?a=1&X-Amz-Signature=ab%2F&b=2", "https://host/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/x?access_token=q", "https://h/x?access_token=***"),
        ("git+https://ghp_" + "a" * 36 + "@github.com/a/b", "git+https://***@github.com/a/b"),
        ("token hf_" + "Ab1" * 10, "token ***"),
        ("Authorization: Bearer abcdefgh.12", "Authorization: Bearer ***"),
        (f"a {KEY} b", "a *** b"),
        ("-----BEGIN RSA PRIVATE KEY-----\nx\n-----END RSA PRIVATE KEY-----\ny", "***\ny"),
        ("/work/data sk-1 abc user@host git@github.com:a/b.git", None),
        ("s3://bucket/folder?x=1 lr=0.1 a/b/c-d_e", None),
    ],
)  # fmt: skip
def test_texts(text, shown):
    assert Redactor(ENVIRONMENT).text(text) == (shown or text)


def test_arguments():
    words = "p.py --api-key word --token=abc --lr 1e-3 HF_TOKEN=x --auth --x".split()
    shown = without_secret_words([*words, KEY], Redactor(ENVIRONMENT))
    hidden = ["--api-key", HIDDEN, f"--token={HIDDEN}", "--lr", "1e-3", f"HF_TOKEN={HIDDEN}"]
    assert shown == ["p.py", *hidden, "--auth", "--x", HIDDEN]


def test_trees():
    tree = {"url": "http://a:b@c", "api_key": "q", "n": [1, None, {"password": "q"}], "token": 5}
    assert Redactor({}).tree(tree) == {
        "url": "http://***@c", "api_key": HIDDEN, "n": [1, None, {"password": HIDDEN}], "token": 5,
    }  # fmt: skip
