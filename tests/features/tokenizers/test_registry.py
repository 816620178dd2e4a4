"""build_tokenizer: every type from its flags, and what it says when a flag is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer import build_tokenizer, implied_type, vocabulary_rows
from megatron.tokenizer.registry import TOKENIZERS


def test_gpt2_bpe(trained, trained_folder):
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(trained_folder / "vocab.json"),
            merge_file=str(trained_folder / "merges.txt"),
        )
    )
    assert tokenizer.tokenize("import os") == trained.tokenize("import os")


@pytest.mark.parametrize("name", ["HFTokenizer", "HuggingFaceTokenizer"])
def test_hugging_face(trained, trained_folder, name):
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type=name, tokenizer_model=str(trained_folder))
    )
    assert tokenizer.tokenize("import os") == trained.tokenize("import os")


def test_null():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10))
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)


def config_of(kind: str, **files) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=kind, **{name: str(path) for name, path in files.items()})


@pytest.mark.parametrize("name", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_wordpiece(wordpiece_file, name):
    tokenizer = build_tokenizer(config_of(name, vocab_file=wordpiece_file))
    same = tokenizer.tokenize("IMPORT") == tokenizer.tokenize("import")
    assert same == (name == "BertWordPieceLowerCase")


@pytest.mark.parametrize(
    "name, lower_case",
    [
        (None, True),
        ("bert-base-uncased", True),
        ("bert-large-cased", False),
        ("bert-base-multilingual-cased", False),
        ("bert-base-chinese", False),
    ],
)
def test_wordpiece_of_2019(wordpiece_file, name, lower_case):
    config = TokenizerConfig(
        tokenizer_type="BertWordPieceTokenizer",
        vocab_file=str(wordpiece_file),
        tokenizer_model_type=name,
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.tokenize("IMPORT") == tokenizer.tokenize("import")) == lower_case


def test_sentencepiece(sentencepiece_files):
    path = sentencepiece_files["llama"]
    text = "import os<SEP>"
    plain = build_tokenizer(config_of("GPTSentencePieceTokenizer", tokenizer_model=path))
    llama = build_tokenizer(config_of("Llama2Tokenizer", tokenizer_model=path))
    megatron = build_tokenizer(config_of("SentencePieceTokenizer", tokenizer_model=path))
    assert llama.tokenize(text) == [llama.bos, *plain.tokenize(text)]
    assert megatron.tokenize(text) == [*plain.tokenize("import os"), megatron.sep]
    assert llama.eod == llama.eos == plain.eod != megatron.eod


@pytest.mark.parametrize("name", ["TikTokenizer", "Llama3Tokenizer"])
def test_tiktoken(ranks_file, name):
    tokenizer = build_tokenizer(config_of(name, tokenizer_model=ranks_file))
    assert tokenizer.tokenize("<|end_of_text|>") == [tokenizer.eod] == [2000]


def test_bytes():
    assert build_tokenizer(config_of("ByteLevel")).tokenize("a") == [97]
    assert build_tokenizer(config_of("ByteLevelTokenizer")).vocab_size == 259
    assert build_tokenizer(config_of("CharacterLevelTokenizer")).tokenize("a") == [105]


def test_every_type_is_in_the_documentation_and_the_help():
    text = (Path(__file__).parents[3] / "docs" / "guides" / "tokenizers.md").read_text()
    missing = [name for name in TOKENIZERS if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize(
    "config, message",
    [
        (TokenizerConfig(), "is missing, .* at --load; expected one of GPT2BPETokenizer"),
        (
            TokenizerConfig(tokenizer_type="GPT2Tokenizer"),
            "--tokenizer-type GPT2Tokenizer is unknown; expected one of .* Did you mean GPT2BPE",
        ),
        (TokenizerConfig(tokenizer_type="GPT2BPETokenizer"), "needs --vocab-file"),
        (
            TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json"),
            "needs --merge-file",
        ),
        (TokenizerConfig(tokenizer_type="HFTokenizer"), "needs --tokenizer-model"),
        (TokenizerConfig(tokenizer_type="NullTokenizer"), "--vocab-size is missing"),
        (TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=0), "--vocab-size is 0"),
        (
            TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5, vocab_extra_ids=100),
            "--vocab-extra-ids 100 cannot be used with",
        ),
        (
            TokenizerConfig(
                tokenizer_type="Llama2Tokenizer", tokenizer_model="m", vocab_extra_ids=1
            ),
            "--vocab-extra-ids 1 cannot be used with",
        ),
        (TokenizerConfig(tokenizer_type="BertWordPieceCase"), "needs --vocab-file: .*none is down"),
        (
            TokenizerConfig(tokenizer_type="BertWordPieceTokenizer", tokenizer_model_type="bpe"),
            "--tokenizer-model-type bpe is not a model of BERT",
        ),
        (TokenizerConfig(tokenizer_type="Llama2Tokenizer"), "needs --tokenizer-model"),
        (TokenizerConfig(tokenizer_type="TikTokenizer"), "needs --tokenizer-model"),
        (TokenizerConfig(tokenizer_type="BertWordPiece"), "Did you mean BertWordPiece"),
    ],
)
def test_wrong_flags(config, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(config)


def test_a_json_vocabulary_needs_its_pattern(tmp_path):
    (tmp_path / "v.json").write_text("[]")
    with pytest.raises(
        ConfigError, match="--tiktoken-pattern is missing: --tokenizer-model .*v.json"
    ):
        build_tokenizer(config_of("TikTokenizer", tokenizer_model=tmp_path / "v.json"))


@pytest.mark.parametrize(
    "given, implied",
    [
        ({"vocab_file": "v", "merge_file": "m"}, "GPT2BPETokenizer"),
        ({"vocab_file": "v"}, "GPT2BPETokenizer"),
        ({"merge_file": "m"}, "GPT2BPETokenizer"),
        ({"cache_dir": "c"}, "GPT2BPETokenizer"),
        ({"vocab_file": "v", "vocab_size": 9}, "GPT2BPETokenizer"),
        ({"vocab_size": 9}, "IdTokenizer"),
    ],
)
def test_implied_type(given, implied):
    found = implied_type(TokenizerConfig(**given), "GPT2BPETokenizer")
    assert found is not None and found[0] == implied
    assert found[1].startswith("--" + next(iter(given)).replace("_", "-"))


def test_nothing_is_implied_by_nothing_or_by_a_model():
    assert implied_type(TokenizerConfig(), "GPT2BPETokenizer") is None
    with pytest.raises(ConfigError, match="--tokenizer-model m needs --tokenizer-type: HFTok"):
        implied_type(TokenizerConfig(tokenizer_model="m", vocab_size=9), "GPT2BPETokenizer")


def test_half_of_a_byte_pair_encoding():
    for given, missing in (("vocab_file", "--merge-file"), ("merge_file", "--vocab-file")):
        with pytest.raises(ConfigError, match=f"needs {missing}"):
            build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **{given: "x"}))


def test_vocabulary_rows(wordpiece_file):
    config = config_of("BertWordPieceCase", vocab_file=wordpiece_file)
    tokenizer = build_tokenizer(config)
    size = tokenizer.vocab_size
    rows = [
        vocabulary_rows(replace(config, vocab_size=n), tokenizer) for n in (None, size, size + 9)
    ]
    assert rows == [size, size, size + 9]
    with pytest.raises(ConfigError, match=f"--vocab-size {size - 1} .* of {size} ids.*{size} or"):
        vocabulary_rows(replace(config, vocab_size=size - 1), tokenizer)
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    assert vocabulary_rows(null, build_tokenizer(null)) == 11
