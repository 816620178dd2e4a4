"""NullTokenizer and IdTokenizer."""

import pytest

from megatron.tokenizer.plain import IdTokenizer, NullTokenizer


def test_integers_between_white_space():
    tokenizer = NullTokenizer(100)
    assert tokenizer.tokenize(" 0 99\n\t7 ") == [0, 99, 7]
    assert [ids.tolist() for ids in tokenizer.tokenize_batch(["1 2", ""])] == [[1, 2], []]
    assert tokenizer.detokenize([0, 99, 100]) == "0 99 <eod>"


@pytest.mark.parametrize("text, found", [("1 two", "'two'"), ("100", "id 100"), ("-1", "id -1")])
def test_other_text(text, found):
    with pytest.raises(ValueError, match=found):
        NullTokenizer(100).tokenize(text)


def test_id_outside():
    with pytest.raises(ValueError, match="token id 101 is outside the vocabulary of 101"):
        NullTokenizer(100).detokenize([101])


def test_against_auto_tokenizer_of_saved_folder(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = NullTokenizer(100)
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = " ".join(map(str, range(100)))
    assert reloaded(text)["input_ids"] == tokenizer.tokenize(text)
    assert reloaded.decode([3, 4, 100]) == tokenizer.detokenize([3, 4, 100])
    assert reloaded.eos_token_id == tokenizer.eod


def test_ids_without_a_meaning():
    tokenizer = IdTokenizer(100)
    assert tokenizer.vocab_size == 100
    assert tokenizer.tokenize("0 99") == [0, 99] and tokenizer.detokenize([0, 99]) == "0 99"
    with pytest.raises(ValueError, match="id 100 in the text is outside 0 to 99"):
        tokenizer.tokenize("100")
    with pytest.raises(ValueError, match="--vocab-size 100, .*--tokenizer-type GPT2BPETokenizer"):
        _ = tokenizer.eod


def test_ids_without_a_meaning_have_no_files(tmp_path):
    IdTokenizer(100).save_pretrained(tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
