"""The tokens at which texts end, as transformers reads them from a folder."""

import json

import pytest
from generation_models import their_model
from transformers import GenerationConfig

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint, tokenizer_in
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.generation_settings import end_tokens, ends_of, read_generation, write_of_run
from megatron.tokenizer.plain import NullTokenizer

ROWS = 61


def folder_with(folder, generation, config):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def their_ends(folder):
    """As `from_pretrained` of a model reads them."""
    try:
        found = GenerationConfig.from_pretrained(folder)
    except OSError:
        found = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )
    ends = found.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}),
        ({"eos_token_id": [2, 7, 9]}, {"eos_token_id": 2}),
        ({"eos_token_id": [7]}, {}),
        ({"eos_token_id": []}, {}),
        (None, {"eos_token_id": [1, 7]}),
        (None, {"eos_token_id": 0}),
        (None, {"text_config": {"eos_token_id": [1, 7]}}),
        (None, {"eos_token_id": 5, "text_config": {"eos_token_id": [1, 7]}}),
        (None, {"eos_token_id": None, "decoder": {"eos_token_id": 3}}),
        (None, {"decoder": {}, "text_config": {"eos_token_id": 3}}),
        (None, {}),
        ({"temperature": 0.6}, {}),
        ({"eos_token_id": None}, {"eos_token_id": None}),
    ],
)
def test_ends_are_those_of_transformers(tmp_path, generation, config):
    folder = folder_with(tmp_path, generation, {"model_type": "llama", **config})
    assert ends_of(read_generation(folder, ROWS, "llama")) == their_ends(folder)


def test_config_names_the_end_that_generation_config_lacks(tmp_path):
    """There transformers would never stop."""
    folder = folder_with(tmp_path, {"temperature": 0.6}, {"eos_token_id": [1, 7]})
    found = read_generation(folder, ROWS, "llama")
    assert found == {"temperature": 0.6, "eos_token_id": [1, 7]}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generation_config.json", [7, 61], "names 61, which is not a token of the model"),
        ("generation_config.json", -1, "names -1, which is not a token"),
        ("generation_config.json", "7", "eos_token_id is '7'; expected the id"),
        ("generation_config.json", True, "eos_token_id is True; expected the id"),
        ("config.json", [7, 1.5], r"eos_token_id is \[7, 1.5\]; expected the id"),
        ("config.json", 50256, "names 50256, which is not a token"),
    ],
)
def test_what_is_not_a_token_is_refused(tmp_path, name, value, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=f"{tmp_path / name}: .*{message}"):
        read_generation(tmp_path, ROWS, "llama")


def test_the_default_of_a_larger_vocabulary_ends_nothing(tmp_path):
    """transformers writes 50256 for a GPT-2 of any size."""
    folder_with(tmp_path, {"eos_token_id": 50256, "top_p": 0.5}, {"eos_token_id": 50256})
    assert read_generation(tmp_path, ROWS, "gpt2") == {"top_p": 0.5}


@pytest.mark.parametrize("taught", [None, frozenset({7, 60})])
def test_a_run_writes_where_its_texts_end(tmp_path, taught):
    tokenizer = NullTokenizer(60)
    base = {"eos_token_id": [9, 7], "top_p": 0.5}
    write_of_run(tmp_path / "tokenizer", tokenizer, base, taught)
    ends = {"eos_token_id": [9, 7, 60] if taught is None else [7, 60]}
    assert read_generation(tmp_path / "tokenizer", ROWS) == base | ends
    assert end_tokens(tokenizer, ends) == set(ends["eos_token_id"])


@pytest.mark.parametrize("tokenizer", [True, False])
def test_checkpoints_keep_the_ends_of_a_folder(tmp_path, tokenizer):
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    folder_with(tmp_path / "theirs", {"eos_token_id": [60, 7]}, None)
    if tokenizer:
        NullTokenizer(60).save_pretrained(tmp_path / "theirs")
    source = open_checkpoint(tmp_path / "theirs")
    for name in ("first", "second"):
        source = open_checkpoint(write_checkpoint(tmp_path / name, source))
        assert source.generation == {"eos_token_id": [60, 7]}
        assert (tokenizer_in(source.folder) is None) == (not tokenizer)
        assert (source.tokenizer is None) == (not tokenizer)
