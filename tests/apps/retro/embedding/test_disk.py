"""tools/bert_embedding: vectors of texts in files, against transformers."""

import numpy as np
import pytest
from small_encoders import TEXTS, states_alone, write_encoder

from megatron.apps.retro.embedding import HashingEmbedder
from megatron.apps.retro.embedding.disk import run_embedding, stored_vectors, texts_of
from megatron.config import ConfigError


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert")


def test_blocks_of_texts(tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "a fox"}\n{"text": ""}\n{"text": "a dog"}\n')
    words = ["--input", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "vectors")]
    run_embedding(None, [*words, "--bert-embedder-type", "hashing", "--block-size", "2"])
    assert "3 vectors of width 256 in 2 files" in capsys.readouterr().out
    stored = stored_vectors(tmp_path / "vectors")
    own = HashingEmbedder(256).embed(["a fox", "", "a dog"])
    assert np.array_equal(stored, own)


@pytest.mark.proof
def test_vectors_are_those_of_transformers(encoder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    words = ["--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "vectors")]
    words += ["--bert-embedder-type", "huggingface", "--bert-load", str(encoder)]
    run_embedding(None, [*words, "--block-size", "3"])
    assert "8 vectors of width 24 in 3 files" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "vectors").glob("*.hdf5"))
    assert names == ["00-03.hdf5", "03-06.hdf5", "06-08.hdf5"]
    stored = stored_vectors(tmp_path / "vectors")
    for number in (0, 2, 7):
        states = states_alone(encoder, TEXTS[number])[1:-1]
        assert np.allclose(stored[number], states.mean(0).numpy(), atol=1e-5), number
    assert not stored[1].any(), "no tokens"
    (tmp_path / "vectors" / "03-06.hdf5").unlink()
    run_embedding(None, [*words, "--block-size", "3"])
    assert "embedding: 2 of 3 blocks exist" in capsys.readouterr().out
    assert np.array_equal(stored_vectors(tmp_path / "vectors"), stored)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n{"other": 1}\n', 'line 2 has no text under "text"'),
        ("a.jsonl", '{"text": "x"}\n{\n', "line 2 is not valid JSON"),
        ("a.txt", "", "is empty"),
    ],
)
def test_texts_that_cannot_be_read_are_named(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        texts_of(str(tmp_path / name), "text")


def test_flags_are_checked(tmp_path):
    for words, said in (
        ([], "--input is missing"),
        (["--input", "a"], "--output is missing"),
        (["--input", "a", "--output", "b"], "--input a: there is no such file"),
        (["--input", "a", "--output", "b", "--block-size", "0"], "--block-size 0 must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_embedding(None, words)
