"""Properties of T5 alone: how its head is said to be tied and scaled, tokenizers with sentinels,
texts that it generates."""

import dataclasses
import json
import shutil

import pytest
import torch
from configs import run_config
from hf_cases import CASES
from hf_inputs import pair
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5ForConditionalGeneration

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.families import build_model
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.formats.conversion.commands import export_hf
from megatron.formats.huggingface.compare import compare_logits
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of

V10, V11 = CASES["t5"]["1.0"], CASES["t5"]["1.1"]
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat is red dog blue and . a ##s".split()
SENTINELS = 5


def ours_of(source):
    return model_of(source, torch.float32, torch.device("cpu"))


def change_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "-"}))


def test_what_both_versions_say_about_the_head(hf_folder):
    """transformers 4 ties by tie_word_embeddings, and scales where it does; 5 says true for all."""
    tied, untied = hf_folder("t5", "tied", **V10), hf_folder("t5", "untied", **V11)

    def head(folder):
        embedding = HuggingFaceFolder(folder).model.embedding
        return embedding.tied, embedding.scale_head_input

    assert (head(tied), head(untied)) == ((True, True), (False, False))
    for folder, tie in ((tied, True), (untied, False)):
        change_config(folder, tie_word_embeddings=tie, scale_decoder_outputs="-")
    assert (head(tied), head(untied)) == ((True, True), (False, False))
    change_config(tied, tie_word_embeddings="-")  # as the first files were
    assert head(tied) == (True, True)
    change_config(untied, tie_word_embeddings="-")
    with pytest.raises(CheckpointError, match="lm_head.weight differs from shared.weight"):
        HuggingFaceFolder(untied)


def test_tensors_of_old_files(hf_folder):
    """Copies of the table, and a bias that transformers does not read."""
    folder = hf_folder("t5", **V10)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors |= {name: tensors["shared.weight"].clone() for name in copies}
    save_file(tensors | {bias: torch.ones(8, 4)}, path)
    names = HuggingFaceFolder(folder).names()
    assert not any("cross" in name and "bias" in name for name in names)
    tensors["encoder.embed_tokens.weight"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="encoder.embed_tokens.weight differs from shared"):
        HuggingFaceFolder(folder)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_rounding_of_large_weights(hf_folder, version):
    """Scores that are not scaled make it large; T5 there casts to float32 whatever its weights."""
    folder = hf_folder("t5", scale=0.5, **CASES["t5"][version])
    source = HuggingFaceFolder(folder)
    ours = ours_of(source)
    actual = compare_logits(ours, folder, source.model)
    assert actual.agree and actual.largest < 1e-9
    with torch.no_grad():
        next(ours.parameters())[3, 5] += 1e-2
    assert not compare_logits(ours, folder, source.model).agree


def test_a_tied_head_that_is_not_scaled(hf_folder, tmp_path):
    """transformers 4 has no such thing, so the head is written as another."""
    folder = hf_folder("t5", **V10)
    change_config(folder, scale_decoder_outputs=False)
    source = HuggingFaceFolder(folder)
    assert source.model.embedding.tied and not source.model.embedding.scale_head_input
    (tmp_path / "back").mkdir()
    write_model(source, tmp_path / "back", "float32", 10**9)
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (content["tie_word_embeddings"], content["scale_decoder_outputs"]) == (False, False)
    for path in (folder, tmp_path / "back"):
        assert compare_logits(ours_of(source), path, source.model).agree
    again = HuggingFaceFolder(tmp_path / "back")
    assert compare_logits(ours_of(again), folder, again.model).agree
    # As transformers 5 reads them, a head that is not there is tied.
    change_config(folder, tie_word_embeddings=False, scale_decoder_outputs="-")
    assert HuggingFaceFolder(folder).model == source.model


def test_the_comparison_notices_what_is_wrong(hf_folder):
    """The scale forgotten, padding seen, a bias of the furthest distances."""
    folder = hf_folder("t5", **V10)
    source = HuggingFaceFolder(folder)
    model, ours = source.model, ours_of(source)
    assert compare_logits(ours, folder, model).agree
    embedding = dataclasses.replace(model.embedding, scale_head_input=False)
    unscaled = build_model(dataclasses.replace(model, embedding=embedding))
    unscaled.load_state_dict(ours.state_dict())
    assert not compare_logits(unscaled, folder, model).agree
    form = source.architecture
    inputs = form.task.inputs(model, 1)
    assert inputs.theirs["attention_mask"].sum(1).unique().numel() == 2
    changed = dict(ours.canonical_parameters())["encoder.relative_bias.weight"]
    with torch.no_grad():
        changed[-1, 0] += 0.1
    assert not compare_logits(ours, folder, model).agree


@pytest.fixture
def trained(write_checkpoint, hf_folder, tmp_path):
    """Makes a checkpoint of this project, of a T5 whose weights are random."""

    def make(tokenizer, start):
        source = HuggingFaceFolder(hf_folder("t5", **V11 | {"vocab_size": tokenizer.vocab_size}))
        config = run_config(
            model=dataclasses.replace(source.model, hf_architecture=None),
            sections=(MaskedDataConfig(decoder_start_token=start),),
        )
        return CheckpointReader(
            write_checkpoint(tmp_path / "save", config, ours_of(source), tokenizer)
        )

    return make


@pytest.fixture
def wordpiece():
    return WordPieceTokenizer(dict(zip(WORDS, range(99), strict=False)), True, SENTINELS)


@pytest.mark.parametrize("start", ["pad", "bos"])
def test_export_with_wordpiece(start, trained, wordpiece, tmp_path):
    """The tokenizer of the folder makes what the encoder was trained with, and the decoder starts
    as it did."""
    folder = tmp_path / "hf"
    folder.mkdir()
    assert "agree" in export_hf(trained(wordpiece, start), folder, 10**9)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the <extra_id_0> is red and <extra_id_1> ."
    actual = tokenizer([text, "the dog"], padding=True, return_tensors="pt")
    ids = [*wordpiece.tokenize(text), wordpiece.eos]
    assert actual["input_ids"][0].tolist() == ids
    assert actual["input_ids"][1].tolist()[:4] == [
        *wordpiece.tokenize("the dog"), wordpiece.eos, wordpiece.pad,
    ]  # fmt: skip
    # After the vocabulary's own, as Megatron has them.
    names = ["[BOS]", "[EOS]", "<extra_id_0>", "<extra_id_4>"]
    assert tokenizer.convert_tokens_to_ids(names) == [len(WORDS) + n for n in (0, 1, 2, 6)]
    model = T5ForConditionalGeneration.from_pretrained(folder)
    first = {"pad": wordpiece.pad, "bos": wordpiece.bos}[start]
    config = model.config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        wordpiece.pad, wordpiece.eos, first,
    )  # fmt: skip
    made = model.generate(**actual, max_new_tokens=4)
    assert made[:, 0].tolist() == [first] * 2 and made.shape[1] <= 5


@pytest.mark.realdata
def test_tokenizer_of_t5(hf_folder, realdata, tmp_path):
    """T5's own files: the sentinels count down from the end, and every text ends with </s>."""
    folder = hf_folder("t5", **(V10 | {"vocab_size": 32128}))
    shutil.copyfile(realdata / "tokenizers_sp" / "t5_spiece.model", folder / "spiece.model")
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = HuggingFaceFolder(folder)
    (tmp_path / "back").mkdir()
    write_model(source, tmp_path / "back", "float32", 10**9)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = tokenizer("The house is <extra_id_0> and <extra_id_1>")["input_ids"]
    assert ids[3:] == [32099, tokenizer.convert_tokens_to_ids("▁and"), 32098, 1]
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert model.generate(torch.tensor([ids]), max_new_tokens=3)[0, 0] == 0
    config = model.config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)
    ours = SentencePieceTokenizer.from_file(folder / "spiece.model", 100)
    assert tokenizer("The house")["input_ids"] == [*ours.tokenize("The house"), ours.eos]


def test_every_position_that_is_compared_counts(hf_folder):
    """Labels of padding are no part of the pairs that the tests compare."""
    model = HuggingFaceFolder(hf_folder("t5", **V10)).model
    inputs = pair(model, 12)
    assert (inputs.theirs["labels"] >= 0).sum(1).tolist() == [8, 6, 4]
    assert inputs.theirs["attention_mask"].sum(1).tolist() == [12, 9, 6]
