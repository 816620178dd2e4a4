"""Vectors of BERTs in every format, compared with transformers, one text at a time."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_encoders import POSITIONS, TEXTS, WIDTH, states_alone, write_encoder

from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding import build_embedder
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError, Setting
from megatron.engine import loading
from megatron.formats.conversion.commands import import_hf
from megatron.formats.legacy_megatron.writer import write_megatron


def changed(encoder, folder, drop=None, add=None):
    """A copy without one of its weights, or with other values of one."""
    shutil.copytree(encoder, folder)
    weights = load_file(folder / "model.safetensors")
    if add is not None:
        weights[add] += 1e-3
    weights.pop(drop, None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(folder, texts=TEXTS, most=POSITIONS):
    """Means over positions 1 to n - 2, [n, H]."""
    rows = []
    for text in texts:
        states_SH = states_alone(folder, text.replace("<|endoftext|>", ""), most)
        rows.append(states_SH[1:-1].mean(0) if len(states_SH) > 2 else torch.zeros(WIDTH))
    return np.stack([np.asarray(row) for row in rows])


@pytest.fixture(scope="module")
def formats(encoder, tmp_path_factory):
    """The same model in each format."""
    folder = tmp_path_factory.mktemp("formats")
    import_hf(encoder, folder / "own", "--input", "--output")
    vocabulary = encoder / "vocab.txt"
    write_megatron(open_checkpoint(encoder), folder / "legacy", tensor_size=3, pipeline_size=2)
    legacy = {
        "bert_load": str(folder / "legacy"),
        "retro_bert_vocab_file": str(vocabulary),
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
    }
    return {
        "transformers": {"bert_load": str(encoder), "bert_embedder_type": "huggingface"},
        "read as ours": {"bert_load": str(encoder)},
        "ours": {"bert_load": str(folder / "own")},
        "legacy": legacy,
    }


@pytest.mark.parametrize("name", ["transformers", "read as ours", "ours", "legacy"])
def test_vectors_are_means_of_the_last_states(name, formats, encoder):
    embedder = build_embedder(EmbedderFlags(**formats[name], retro_bert_batch_size=3))
    wanted = expected(encoder)
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(embedder.embed(TEXTS), wanted, rtol=1e-6, atol=1e-6)
    assert embedder.width == WIDTH and embedder.embed([]).shape == (0, WIDTH)
    lengths = embedder.lengths(TEXTS)
    assert lengths[[1, 3]].tolist() == [0, 0] and lengths[5] > POSITIONS
    assert lengths[4] == embedder.lengths(["lazy dogs"])[0] > 0


@pytest.mark.proof
def test_pre_norm_models(tmp_path):
    """NVIDIA's, whose last norm is the model's."""
    folder = write_encoder(tmp_path, "MegatronBert")
    for kind in ("megatron", "huggingface"):
        embedder = build_embedder(EmbedderFlags(bert_load=str(folder), bert_embedder_type=kind))
        np.testing.assert_allclose(embedder.embed(TEXTS), expected(folder), rtol=1e-6, atol=1e-6)


def test_a_process_embeds_alone(encoder, monkeypatch):
    """Next to a run of several processes the others need not load the model, too."""
    monkeypatch.setattr(loading, "first_reason", lambda *args: pytest.fail("it asks other ranks"))
    embedder = build_embedder(EmbedderFlags(bert_load=str(encoder)))
    assert np.isfinite(embedder.embed(TEXTS)).all()


@pytest.mark.parametrize("name", ["transformers", "read as ours"])
def test_texts_are_cut(name, formats, encoder):
    flags = EmbedderFlags(**formats[name], retro_bert_max_chunk_length=9)
    found = build_embedder(flags).embed(TEXTS)
    np.testing.assert_allclose(found, expected(encoder, most=9), rtol=1e-6, atol=1e-6)


def test_load_names_the_model_too(encoder):
    settings = {"load": Setting(str(encoder), "flag --load")}
    vectors = build_embedder(EmbedderFlags(), settings).embed(TEXTS)
    np.testing.assert_allclose(vectors, expected(encoder), rtol=1e-6, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["megatron", "huggingface"])
def test_half_precision(kind, encoder):
    settings = {"bf16": Setting(True, "flag --bf16")}
    flags = EmbedderFlags(bert_load=str(encoder), bert_embedder_type=kind)
    embedder, wanted = build_embedder(flags, settings), expected(encoder)
    found = embedder.embed(TEXTS)
    error = np.abs(found - wanted).max()
    assert 1e-4 < error < 0.1
    assert embedder.identity != build_embedder(flags).identity


def test_identity_is_that_of_the_numbers(formats, encoder, tmp_path):
    """Formats of the same weights have one; other weights, vocabularies and lengths another. What
    transformers draws for a pooler that files lack plays no part."""
    same = [build_embedder(EmbedderFlags(**formats[n])) for n in ("read as ours", "ours", "legacy")]
    assert same[0].identity == same[1].identity == same[2].identity
    found = [json.dumps(dict(same[0].identity), sort_keys=True)]
    bare = changed(encoder, tmp_path / "bare", drop="bert.pooler.dense.weight")
    theirs = EmbedderFlags(bert_load=str(bare), bert_embedder_type="huggingface")
    assert build_embedder(theirs).identity == build_embedder(theirs).identity
    other = changed(encoder, tmp_path / "other", add="bert.encoder.layer.1.output.dense.bias")
    cased = shutil.copytree(encoder, tmp_path / "cased")
    settings = json.loads((cased / "tokenizer_config.json").read_text())
    (cased / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    (cased / "tokenizer.json").unlink()
    for kind in ("megatron", "huggingface"):
        for folder, length in ((other, 256), (cased, 256), (encoder, 9)):
            flags = EmbedderFlags(
                bert_load=str(folder), bert_embedder_type=kind, retro_bert_max_chunk_length=length
            )
            found.append(json.dumps(dict(build_embedder(flags).identity), sort_keys=True))
    assert len(set(found)) == len(found)


def refused(**flags):
    with pytest.raises(ConfigError) as error:
        build_embedder(EmbedderFlags(**flags))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_refusals(encoder, tmp_path):
    assert "--bert-load" in refused(bert_embedder_type="megatron")
    assert "--bert-load" in refused(bert_embedder_type="huggingface")
    missing = str(tmp_path / "missing")
    for kind in ("megatron", "huggingface"):
        assert f"--bert-load {missing}" in refused(bert_embedder_type=kind, bert_load=missing)
    gpt = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(gpt).save_pretrained(tmp_path / "gpt")
    assert "family gpt" in refused(bert_load=str(tmp_path / "gpt"))
    # Weights that transformers would draw at random.
    bias = "bert.encoder.layer.1.output.dense.bias"
    lacking = changed(encoder, tmp_path / "lacking", drop=bias)
    message = refused(bert_embedder_type="huggingface", bert_load=str(lacking))
    assert "encoder.layer.1.output.dense.bias" in message
    (lacking / "tokenizer.json").unlink()
    (lacking / "vocab.txt").unlink()
    (lacking / "tokenizer_config.json").unlink()
    message = refused(bert_embedder_type="huggingface", bert_load=str(lacking))
    assert str(lacking) in message
