"""HFTokenizer against transformers' own call over the same folder."""

import dataclasses
import json

import numpy as np
import pytest

from megatron.config import TokenizerConfig
from megatron.data.text_encoder import TextEncoder, TextSettings
from megatron.tokenizer.huggingface import HFTokenizer


@pytest.fixture(scope="module")
def llama_like(trained, tmp_path_factory):
    """A folder whose texts begin with a BOS token, with truncation left on in its file."""
    import tokenizers
    from tokenizers import processors

    folder = tmp_path_factory.mktemp("llama_like")
    trained.save_pretrained(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_against_auto_tokenizer(llama_like, fuzzed_strings):
    from transformers import AutoTokenizer

    ours, reference = HFTokenizer(llama_like), AutoTokenizer.from_pretrained(llama_like)
    texts = [text for text in fuzzed_strings(500, 5) if text]
    wanted = reference(texts)["input_ids"]
    assert max(map(len, wanted)) > 8, "truncation must not act"
    assert [ids.tolist() for ids in ours.tokenize_batch(texts)] == wanted
    assert [ours.tokenize(text) for text in texts] == wanted
    assert ours.detokenize(wanted[0]) == reference.decode(wanted[0])
    assert wanted[0][0] == reference.bos_token_id
    assert ours.eod == reference.eos_token_id == 2001
    assert ours.vocab_size == 2002, "added tokens count"


def test_sentences_have_no_tokens_around_them(llama_like):
    """Of texts that become documents they are part; within a sample of BERT or T5 they are not."""
    settings = TextSettings(TokenizerConfig("HFTokenizer", tokenizer_model=str(llama_like)))
    text = "One sentence here. Another one there."
    (document,) = TextEncoder(settings)([text])
    (sentences,) = TextEncoder(dataclasses.replace(settings, splitter="rules"))([text])
    bos, *rest = document[0].tolist()
    assert bos == HFTokenizer(llama_like).bos and len(sentences) == 2
    assert bos not in np.concatenate(sentences) and bos not in rest


def test_saved_folder_gives_the_same_ids(llama_like, tmp_path):
    ours = HFTokenizer(llama_like)
    ours.save_pretrained(tmp_path)
    text = "def f(x): return [x, x + 1, x + 2, x + 3]"
    assert HFTokenizer(tmp_path).tokenize(text) == ours.tokenize(text)


def test_a_folder_that_cannot_be_written_is_named(llama_like, tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match=f"{tmp_path}: the tokenizer cannot be written: .*os error"):
        HFTokenizer(llama_like).save_pretrained(tmp_path)


def test_errors(llama_like, trained_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="--tokenizer-model .*none does not exist"):
        HFTokenizer(tmp_path / "none")
    (tmp_path / "readme.md").write_text("no tokenizer")
    with pytest.raises(
        ValueError, match=r"not a tokenizer that .* \(the folder contains readme.md\)"
    ):
        HFTokenizer(tmp_path)
    tokenizer = HFTokenizer(llama_like)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.tokenize("\ud800")
    with pytest.raises(ValueError, match="token id 5000 is outside"):
        tokenizer.detokenize([5000])


def test_no_eos(llama_like, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((llama_like / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ValueError, match="no token for the end of document"):
        _ = HFTokenizer(tmp_path).eod
