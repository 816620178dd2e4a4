"""A feature is a folder: one with a kind of data has flags, and is trained from."""

import json
import shutil

import pytest
from import_statements import ROOT, closure
from warm_runs import WarmRuns, alive, status_of, wait

FLAGS = '''
"""Documents that are lists of token ids, a JSON line each."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import option
from megatron.config.features import KindConfig


@dataclass(frozen=True)
class TokenLinesConfig(KindConfig):
    """Token lines: documents that are lists of token ids."""

    token_lines: bool = option(False)
    """The data paths name JSON lines of lists of token ids."""
    last_token: int = option(0)
    """Token put after each document."""

    files: ClassVar[str | None] = "token_lines"
    idle: ClassVar[str] = "no data of this run are token lines"

    @property
    def reads_all(self) -> bool:
        return self.token_lines
'''

READER = '''
"""Reads lists of token ids."""

import json

import numpy as np

from megatron.features.token_lines.flags import TokenLinesConfig
from megatron.data.build import SourceReader
from megatron.data.pipeline import DataKind, DataPipeline


class TokenLines:
    def __init__(self, path: str, last: int) -> None:
        self.prefix = path
        with open(path) as lines:
            self.documents = [np.array([*json.loads(line), last]) for line in lines]
        self.sequence_lengths = np.array([len(d) for d in self.documents], np.int32)
        self.document_indices = np.arange(len(self.documents) + 1)
        self.lengths_digest = str(self.sequence_lengths.tolist())

    def __len__(self) -> int:
        return len(self.documents)

    def get(self, index, offset=0, length=None):
        return self.documents[index][offset : None if length is None else offset + length]

    def verify(self) -> None:
        pass


class Kind(DataKind):
    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(TokenLinesConfig)
        return SourceReader(lambda path, _: TokenLines(path, config.last_token), data.recipe())


KIND = Kind()
'''

FEATURE = '''
"""Training on lists of token ids."""

from megatron.config.features import Feature
from megatron.features.token_lines.flags import TokenLinesConfig


class TokenLines(Feature):
    sections = {"token_lines": TokenLinesConfig}

    def data_kind(self, section):
        from megatron.features.token_lines.kind import KIND

        return KIND


FEATURE = TokenLines()
'''

TRAIN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 9 --num-workers 0 "
    "--eval-iters 0 --peak-tflops 1 --train-iters 2 --split 1,0,0"
).split()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs pretrain_gpt.py of a copy of the project that has one kind of data more."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "megatron", folder / "megatron")
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    own = folder / "megatron" / "features" / "token_lines"
    own.mkdir()
    for name, content in (("flags", FLAGS), ("kind", READER), ("feature", FEATURE)):
        (own / f"{name}.py").write_text(content)
    (own / "__init__.py").touch()
    lines = [json.dumps([number % 8 + 1] * 12) for number in range(30)]
    (folder / "tokens.txt").write_text("\n".join(lines))

    warm = WarmRuns("pretrain_gpt", root=folder)

    def run(*flags: str) -> str:
        output = folder / "output"
        processes = warm.start(flags, 1, output)
        wait(processes, lambda: not alive(processes), pause=0.01)
        return f"{status_of(output, 0)} {output.read_text()}"

    run.folder = folder
    yield run
    warm.stop()


def test_a_new_kind_is_trained_from(start):
    saved = start.folder / "saved"
    flags = "--token-lines --last-token 8 --data-path tokens.txt".split()
    told = start(*TRAIN, *flags, "--save", str(saved), "--save-interval", "2")
    assert told.startswith("0 ") and "iteration        2/       2" in told, told
    (config,) = saved.glob("global_step2/config.json")
    section = json.loads(config.read_text())["token_lines"]
    assert section == {"token_lines": True, "last_token": 8}


def test_a_new_kind_has_flags(start):
    told = start("--help")
    assert "Token lines: documents that are lists of token ids:" in told
    assert "--last-token INT" in told
    told = start(*TRAIN, "--token-lines", "--data-path", "tokens.txt", "--explain-config")
    assert "[token_lines]" in told


def test_its_flags_are_refused_where_nothing_follows_them(start):
    (start.folder / "corpora.json").write_text('{"books": {"files": "books"}}')
    told = start(*TRAIN, "--last-token", "3", "--train-data", "books")
    assert "--last-token would change nothing: no data of this run are token lines" in told, told


def test_training_imports_no_kind_by_itself():
    """Flags of all kinds, and what the run's own ask for."""
    found = closure(ROOT / "pretrain_gpt.py", ROOT / "megatron" / "families" / "gpt.py")
    assert not [path for path in found if path.name == "kind.py"]
