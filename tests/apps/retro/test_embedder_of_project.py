"""Which embedder the flags of a project mean, in its first stage and in later ones."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import upstream_retro as upstream
from small_encoders import write_encoder

from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.apps.retro.preprocessing import configured
from megatron.config import ConfigError
from megatron.run.run import RunToolParser


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return upstream.write_corpora(tmp_path_factory.mktemp("c"), [upstream.corpus("a", 20, 1)])[0]


def work(folder, *words):
    """What the stages of a command line work with."""
    parser = RunToolParser(RetroPreprocessConfig, None)
    return configured(parser.settings(["--retro-project-dir", str(folder), *map(str, words)]))


def data(prefix, gpt="--"):
    """The GPT's data; ``gpt`` is how the flags of its tokenizer and lengths begin."""
    return [
        *("--data-path", prefix, "--split", "80,15,5", "--train-samples", "40"),
        *("--global-batch-size", "4", "--eval-interval", "5", "--eval-iters", "2"),
        *(f"{gpt}seq-length", "64", f"{gpt}tokenizer-type", "ByteLevelTokenizer"),
    ]


def vector(found):
    return found.embedder.embed(["The quick brown fox."])


def test_flags_of_the_data_do_not_describe_the_bert(prefix, encoder, tmp_path):
    """A length and a tokenizer without gpt are those of the data, unless the data have their own;
    with them they are the BERT's."""
    first = work(tmp_path / "one", *data(prefix), "--bert-load", encoder)
    assert first.run.config.model.seq_length == 64
    bert = ["--seq-length", "40", "--tokenizer-type", "BertWordPieceLowerCase"]
    bert += ["--vocab-file", encoder / "vocab.txt", "--load", encoder]
    second = work(tmp_path / "two", *data(prefix, "--retro-gpt-"), *bert)
    assert second.run.config.model.seq_length == 64
    assert second.run.config.tokenizer.tokenizer_type == "ByteLevelTokenizer"
    assert first.embedder.identity == second.embedder.identity
    np.testing.assert_array_equal(vector(first), vector(second))


def test_later_stages_need_no_flags(prefix, encoder, tmp_path, monkeypatch):
    """Not in another folder either; nor is a --load, of a model that generates, the embedder's."""
    monkeypatch.chdir(encoder.parent)
    first = work(tmp_path / "bert", *data(prefix), "--load", encoder.name)
    wanted = vector(first)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(vector(work(tmp_path / "bert")), wanted)
    work(tmp_path / "hashing", *data(prefix))
    later = work(tmp_path / "hashing", "--load", encoder)
    assert later.embedder.identity["type"] == "hashing"


def test_a_model_may_move_and_not_change(prefix, encoder, tmp_path):
    folder = tmp_path / "project"
    wanted = vector(work(folder, *data(prefix), "--bert-load", encoder))
    moved = shutil.copytree(encoder, tmp_path / "moved")
    np.testing.assert_array_equal(vector(work(folder, "--bert-load", moved)), wanted)
    other = write_encoder(tmp_path / "other", "MegatronBert")
    # The same weights, by the same names, in another order of norms.
    with pytest.raises(ConfigError, match="not the one of .*model"):
        work(folder, "--bert-load", other).embedder  # noqa: B018
    with pytest.raises(ConfigError, match="--bert-embedder-type hashing"):
        work(folder, "--bert-embedder-type", "hashing")


def test_hashing_with_a_model_is_refused(prefix, encoder, tmp_path):
    work(tmp_path / "project", *data(prefix))
    with pytest.raises(ConfigError, match=f"--bert-load {Path(encoder)}: .*hashing"):
        work(tmp_path / "project", "--bert-load", encoder).embedder  # noqa: B018
