"""Values of secret names are not in a patch, and its code is as it was."""

import time

import pytest

from megatron.features.run_record.source_tree import without_values

KEY = "0123456789abcdef0123456789abcdef01234567"


def section(name: str, line: str) -> str:
    return f"diff --git a/{name} b/{name}\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+{line}\n"


@pytest.mark.parametrize(
    "name, line, shown",
    [
        ("a.ini", "aws_secret_access_key = wJalr/tn EMI", "aws_secret_access_key = ***"),
        ("a.json", '{"password": "hunter2hunter2", "n": 3}', '{"password": "***", "n": 3}'),
        ("a.json", '{"token":12345678,"auth":{"key": "a\\"b"}}',
         '{"token":***,"auth":{"key": "***"}}'),
        ("a.sh", f"export WANDB_API_KEY={KEY}", "export WANDB_API_KEY=***"),
        ("a.sh", "A=${HF_TOKEN:-abc} B='x' HF_TOKEN=\"a b\" x",
         "A=${HF_TOKEN:-***} B='x' HF_TOKEN=\"***\" x"),
        ("a.sh", "p.py --api-key abc --lr 1 --auth=x", "p.py --api-key *** --lr 1 --auth=***"),
        ("a.sh", 'curl -H "Authorization: token abc" x', 'curl -H "Authorization: ***" x'),
        ("a.yaml", "  db_password: correct horse", "  db_password: ***"),
        ("a.yaml", 'env: {WANDB_API_KEY: "abc", b: 1}', 'env: {WANDB_API_KEY: "***", b: 1}'),
        ("a.toml", "password = 'x\"y'", "password = '***'"),
        ("b/.env", "SECRET=it's", "SECRET=***"),
        ("a.py", 'd = {"password": "x1"}; auth: str = "y"',
         'd = {"password": "***"}; auth: str = "***"'),
        ("a.py", f'os.environ["HF_TOKEN"] = "abc"; token = "{KEY}"',
         'os.environ["HF_TOKEN"] = "***"; token = "***"'),
    ],
)  # fmt: skip
def test_values_of_secret_names(name, line, shown):
    patch = section("other.py", "x = 1") + section(name, line)
    hidden = section("other.py", "x = 1") + section(name, shown)
    assert without_values(patch) == hidden
    removed = section(name, line).replace("\n+", "\n-")
    assert without_values(removed) == section(name, shown).replace("\n+", "\n-")


@pytest.mark.parametrize(
    "name, line",
    [
        ("a.py", 'password = os.environ["PASSWORD"]; key = "loss"; f(api_key=key, auth=auth)'),
        ("a.py", 'if token == "<s>" or password != word: x = sorted(y, key=lambda key: "a")'),
        ("a.cpp", "auto key = map[secret]; int token = 5;"),
        ("a.sh", 'TOKEN=$(cat x); if [ "$HF_TOKEN" = "" ]; then API_KEY=$1; fi'),
        ("a.sh", "echo ${TOKEN:?missing}"),
        ("a.yaml", "api_key: ${{ secrets.KEY }}"),
        ("a.yaml", "auth: {"),
        ("a.json", '{"eos_token": "</s>", "api_key": null, "auth": false, "tokenizer": "x"}'),
        ("a.ini", "password ="),
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(name, line):
    assert without_values(section(name, line)) == section(name, line)


def test_binary_pieces_stay():
    patch = section("a.ini", "a = 1") + "diff --git a/x b/x\nGIT binary patch\npassword=abc\n"
    assert without_values(patch) == patch


@pytest.mark.parametrize("piece", ["--token ", '"key": "x", ', "password", "token \t", "api_key="])
def test_long_lines_take_little_time(piece):
    begun = time.process_time()
    without_values(section("a.json", piece * 100_000))
    assert time.process_time() - begun < 10
