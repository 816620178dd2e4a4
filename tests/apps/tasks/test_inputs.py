"""Files of --train-data, --valid-data, --output and --predictions that cannot be used."""

import pytest

from megatron.apps.tasks.command import run_task
from megatron.config import ConfigError
from megatron.config.output import check_output

MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16".split()
HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


@pytest.mark.parametrize(
    "words, message",
    [
        ("LAMBADA --valid-data lambada", "--valid-data lambada does not exist; name a file"),
        (
            "WIKITEXT103 --valid-data .",
            r"--valid-data \. is a folder; name a file in it, such as t",
        ),
        ("QQP --epochs 1 --train-data no", "--train-data no does not exist; name a file"),
        ("QQP --epochs 0 --valid-data .", r"--valid-data \. is a folder"),
        ("RACE --epochs 0 --valid-data t.tsv", "--valid-data t.tsv is a file; name a folder"),
        ("RAW --valid-data t.tsv --output t.tsv/a", "--output t.tsv/a: cannot write to t.tsv"),
        (
            "QQP --epochs 1 --train-data t.tsv --predictions t.tsv/a",
            "--predictions t.tsv/a: cannot write to t.tsv",
        ),
        ("QQP --epochs 1 --train-data t.tsv --output .", r"--output \. is a folder; name a file"),
    ],
)
def test_refused_before_anything_is_built(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.tsv").write_text(HEADER + "0\t1\t2\ta\tb\t1\n")
    with pytest.raises(ConfigError, match=message):
        run_task(None, ["--task", *words.split(), *MODEL])


def test_output_folder_is_made_and_left_empty(tmp_path):
    check_output("--output", tmp_path / "new" / "results.json")
    assert list((tmp_path / "new").iterdir()) == []
