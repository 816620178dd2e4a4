"""HFTokenizer against transformers' own call over the same folder."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import tokenizers
from samples import sampled
from transformers import AutoTokenizer

from megatron.config import TokenizerConfig
from megatron.features.raw_text.encoder import TextEncoder, TextSettings
from megatron.features.tokenizers.huggingface import HFTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer


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


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, bytes_ | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": steps}


PRE_TOKENIZERS = {
    "llama3": _split(_LLAMA3),
    "qwen": _split(_LLAMA3.replace("{1,3}", "")),
    "gpt2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "digits": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        ],
    },
}
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast"),
    *("LlamaTokenizerFast", "GPTNeoXTokenizerFast", "CodeLlamaTokenizer", "RobertaTokenizer"),
)
MODEL_TYPES = (None, "qwen2", "gpt2", "llama", "phi3", "qwen3", "mistral", "gpt_neox", "opt")
TABLE = [(*each,) for each in itertools.product(PRE_TOKENIZERS, CLASSES, MODEL_TYPES)]
DIGITS = "It's 3 7 59 20240101 naïve: def f(x):\n\treturn 東京  1024\n I'LL e\u0301"


@pytest.mark.parametrize(
    ("split", "kind", "model_type"),
    sampled(TABLE, lambda *case: case[0] == "llama3" and None in case[1:]),
)
def test_ids_are_those_of_tokenizer_json(trained_folder, tmp_path, split, kind, model_type, caplog):
    """Whatever class transformers 5 makes of model_type and tokenizer_class."""
    content = json.loads((trained_folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = PRE_TOKENIZERS[split]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": kind}
    known = {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    wanted = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(DIGITS).ids
    ours = HFTokenizer(tmp_path)
    assert ours.tokenize(DIGITS) == wanted
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    said = f"AutoTokenizer of transformers makes a {type(theirs).__name__} of it here"
    assert (said in caplog.text) == (ours_of(theirs, DIGITS) != wanted)
    # So it is with what is saved with checkpoints.
    ours.save_pretrained(tmp_path / "saved")
    saved = HFTokenizer(tmp_path / "saved")
    assert saved.tokenize(DIGITS) == wanted and saved.eod == ours.eod


def ours_of(tokenizer, text):
    try:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the class has an unknown token that the vocabulary lacks
        return str(error)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("GPT2Tokenizer", {"add_prefix_space": False}),
        ("BertTokenizer", {"do_lower_case": True}),
        ("BertTokenizer", {"do_lower_case": False, "strip_accents": True}),
        ("BertTokenizer", {"do_lower_case": True, "tokenize_chinese_chars": False}),
    ],
)
def test_settings_that_a_class_reads(trained_folder, wordpiece_file, tmp_path, kind, settings):
    """They count, whatever tokenizer.json says."""
    if kind == "BertTokenizer":
        WordPieceTokenizer.from_file(wordpiece_file, True).save_pretrained(tmp_path)
    else:
        (tmp_path / "tokenizer.json").write_bytes((trained_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": kind, **settings})
    )
    wanted = AutoTokenizer.from_pretrained(tmp_path)("IMPORT Él 東京 x")["input_ids"]
    assert HFTokenizer(tmp_path).tokenize("IMPORT Él 東京 x") == wanted


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "model"])
def test_an_unknown_key_is_refused(llama_like, tmp_path, file):
    for each in llama_like.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    path = tmp_path / ("tokenizer.json" if file == "model" else file)
    content = json.loads(path.read_text())
    (content["model"] if file == "model" else content)["reverse_text"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path} has the key 'reverse_text', which is not known"):
        HFTokenizer(tmp_path)


def test_keys_of_published_folders_pass(llama_like, tmp_path):
    """And those that transformers itself writes of any class."""
    for each in llama_like.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {
        "add_bos_token": True, "add_eos_token": False, "legacy": True, "sp_model_kwargs": {},
        "clean_up_tokenization_spaces": False, "model_max_length": 10**30, "padding_side": "left",
        "spaces_between_special_tokens": False, "use_default_system_prompt": False,
        "chat_template": "{{ messages }}", "special_tokens_map_file": None, "errors": "replace",
        "auto_map": {}, "image_token": "<s>", "processor_class": "A", "stride": 0, "max_length": 9,
        "name_or_path": "a/b", "unsloth_version": "1", "tool_parser_type": "json",
        "additional_special_tokens": [], "extra_special_tokens": {}, "truncation_side": "right",
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    ours = HFTokenizer(tmp_path)
    ours.save_pretrained(tmp_path / "saved")
    assert HFTokenizer(tmp_path / "saved").tokenize("ab 1") == ours.tokenize("ab 1")
