"""Corpora that are classes train as the same texts in files do, bit for bit."""

import json
import os

import numpy as np
import pytest
from training_jobs import TINY, train

from megatron.features.raw_text import named_corpora

CLASSES = """
import json
from torch.utils.data import Dataset

class Even(Dataset):
    PATH = "numbers.json"
    first = 0
    def __init__(self):
        self.texts = json.load(open(self.PATH))[self.first::2]
    def __len__(self):
        return len(self.texts)
    def __getitem__(self, index):
        return {"text": self.texts[index]}

class Odd(Even):
    first = 1

NAMED_CORPORA = {"even": Even, "odd": Odd}
"""


def train_in(folder, argv):
    """One rank, in a folder that may have a data_utils/corpora.py."""
    before = os.getcwd()
    os.chdir(folder)
    named_corpora._module.cache_clear()
    try:
        return train(argv)
    finally:
        os.chdir(before)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(3)
    texts = [" ".join(map(str, rng.integers(0, 99, rng.integers(4, 60)))) for _ in range(80)]
    (tmp_path / "numbers.json").write_text(json.dumps(texts))
    (tmp_path / "data_utils").mkdir()
    (tmp_path / "data_utils" / "corpora.py").write_text(CLASSES)
    for name, part in (("even", texts[::2]), ("odd", texts[1::2])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    content = {name: {"files": f"{name}.jsonl"} for name in ("even", "odd")}
    (tmp_path / "files.json").write_text(json.dumps(content))
    return tmp_path


def test_classes_train_as_files_do(pool, folder):
    flags = [flag for flag in TINY if flag != "--mock-data"]
    flags += (
        "--train-data even odd --train-iters 6 --lazy-loader --split 8,1,1 --eval-iters 1".split()
    )
    by_class = pool.run(2, train_in, folder, flags)
    assert len(list((folder / "index-cache").glob("*.jsonl"))) == 2
    by_file = pool.run(2, train_in, folder, [*flags, "--corpora-file", "files.json"])
    for found, expected in zip(by_class, by_file, strict=True):
        assert len(found.losses) == 6 and found.losses == expected.losses
        assert found.norms == expected.norms
