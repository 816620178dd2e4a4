"""Training a vocabulary."""

import pytest

from megatron.features.tokenizers.train import train_byte_level_bpe, train_wordpiece


def test_is_gpt2s_form(trained):
    vocab = trained._vocab
    assert list(vocab.values()) == list(range(2000))
    assert list(vocab)[-1] == "<|endoftext|>" and len(trained._merges) == 2000 - 257
    assert [a + b for a, b in trained._merges] == list(vocab)[256:-1]


@pytest.mark.realdata
def test_byte_ids_are_those_of_gpt2(trained, realdata):
    from megatron.tokenizer.gpt2_bpe import read_vocabulary

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


@pytest.mark.parametrize("lower_case", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_wordpiece_is_berts_form_and_deterministic(python_sources, tmp_path, lower_case):
    texts = [*python_sources[:40], "Ünïcode 中文"]
    files = []
    for name in ("a", "b"):
        tokenizer = train_wordpiece(lambda: iter(texts), 1000, 2, lower_case)
        tokenizer.save_pretrained(tmp_path / name)
        files.append((tmp_path / name / "vocab.txt").read_text())
    assert files[0] == files[1]
    vocab = files[0].split("\n")[:-1]
    assert len(vocab) == len(set(vocab)) == 1000
    assert vocab[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert any(token.isupper() for token in vocab[5:]) != lower_case
    unknown = [tokenizer.tokenize(text).count(1) / len(tokenizer.tokenize(text)) for text in texts]
    assert max(unknown[:-1]) < 0.01


def test_wordpiece_keeps_the_most_frequent_characters():
    """A quarter of the vocabulary; of equally frequent ones the lowest code points."""
    text = "".join(chr(c) * 2 for c in range(0x3B1, 0x3C2)) + "aaa bbb" * 9
    vocab = train_wordpiece(lambda: [text], 33, 100, True)._vocab
    singles = [token for token in vocab if len(token) == 1]
    assert singles == ["a", "b", *map(chr, range(0x3B1, 0x3B6))] and len(singles) == (33 - 5) // 4


def test_wordpiece_vocab_size_too_small():
    with pytest.raises(ValueError, match="--vocab-size 31 is too small"):
        train_wordpiece(lambda: ["a"], 31, 2, True)
