"""Training a vocabulary."""

import pytest

from megatron.tokenizer.train import train_byte_level_bpe


def test_is_gpt2s_form(trained):
    vocab = trained._vocab
    assert list(vocab.values()) == list(range(2000))
    assert list(vocab)[-1] == "<|endoftext|>" and len(trained._merges) == 2000 - 257
    assert [a + b for a, b in trained._merges] == list(vocab)[256:-1]


@pytest.mark.realdata
def test_byte_ids_are_those_of_gpt2(trained, realdata):
    from megatron.tokenizer.byte_level import read_vocabulary

    gpt2 = read_vocabulary(str(realdata / "gpt2_bpe" / "gpt2-vocab.json"))
    assert [token for token, i in gpt2.items() if i < 256] == list(trained._vocab)[:256]


def test_is_deterministic(trained, python_sources):
    again = train_byte_level_bpe(iter(python_sources), 2000, 2)
    assert (again._vocab, again._merges) == (trained._vocab, trained._merges)


def test_min_frequency_and_too_little_text():
    text = ["aaab aaab aaab xy"]
    assert train_byte_level_bpe(text, 1000, 2).vocab_size < 270
    assert "xy" not in train_byte_level_bpe(text, 1000, 2)._vocab
    assert "Ġxy" in train_byte_level_bpe(text, 1000, 1)._vocab
    assert train_byte_level_bpe([], 1000, 1).vocab_size == 257


def test_vocab_size_too_small():
    with pytest.raises(ValueError, match="--vocab-size 256 is too small"):
        train_byte_level_bpe([], 256, 2)
