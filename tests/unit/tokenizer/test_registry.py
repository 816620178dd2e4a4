"""build_tokenizer: every type from its flags, and what it says when a flag is wrong."""

import pytest

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer import build_tokenizer


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


@pytest.mark.parametrize(
    "config, message",
    [
        (TokenizerConfig(), "--tokenizer-type is missing; it is one of GPT2BPETokenizer"),
        (
            TokenizerConfig(tokenizer_type="GPT2Tokenizer"),
            "--tokenizer-type GPT2Tokenizer is unknown; it is one of .* Did you mean GPT2BPE",
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
            "--vocab-extra-ids 100 does not go with",
        ),
    ],
)
def test_wrong_flags(config, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(config)
