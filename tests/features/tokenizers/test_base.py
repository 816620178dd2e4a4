"""Special ids and word starts: one meaning over all families."""

import shutil

import pytest

from megatron.features.tokenizers.huggingface import HFTokenizer
from megatron.features.tokenizers.pieces import sentinel_ids
from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.features.tokenizers.tik_token import TikTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.tokenizer.base import SpecialIds, Tokenizer
from megatron.tokenizer.plain import NullTokenizer

NAMES = ("cls", "sep", "pad", "mask", "bos", "eos", "eod")


class Words(Tokenizer):
    """Only special ids."""

    def unused(self, *_args):
        raise AssertionError("not used here")

    detokenize = save_pretrained = _encode = _find_word_starts = unused


@pytest.mark.parametrize("name", NAMES)
def test_each_id_or_an_error_that_names_the_vocabulary(name):
    assert getattr(Words("x", 1, SpecialIds(**{name: 0})), name) == 0
    with pytest.raises(ValueError, match=rf"^--vocab-file x has no token for the .*\({name}\); y$"):
        getattr(Words("--vocab-file x", 1, SpecialIds(), hint="; y"), name)


def test_sentinels_are_in_the_order_of_their_numbers():
    vocab = {"<extra_id_2>": 3, "<extra_id_0>": 9, "<extra_id_1>": 7, "<extra_id_4>": 8, "a": 0}
    assert sentinel_ids(vocab) == (9, 7, 3), "up to the first that is missing"
    assert Words("x", 10, SpecialIds(sentinels=(9, 7))).sentinels == [9, 7]


def test_gpt2(trained):
    assert trained.bos == trained.eos == trained.eod == 1999
    ids = trained.tokenize("import self\n<|endoftext|>")
    starts = [bool(trained.word_starts[i]) for i in ids]
    texts = [trained.detokenize([i]) for i in ids]
    assert starts == [text[0] in " \n" or text == "<|endoftext|>" for text in texts]
    assert trained.word_starts.shape == (trained.vocab_size,)


def test_null():
    tokenizer = NullTokenizer(9)
    assert (tokenizer.eos, tokenizer.word_starts.all()) == (9, True)
    with pytest.raises(ValueError, match="NullTokenizer has no token for the mask"):
        _ = tokenizer.mask


@pytest.fixture(params=["gpt2", "bert", "unigram", "ranks"])
def ours(request, trained, wordpiece_file, sentencepiece_files, ranks_file):
    if request.param == "gpt2":
        return trained
    if request.param == "bert":
        return WordPieceTokenizer.from_file(wordpiece_file, True, extra_ids=4)
    if request.param == "unigram":
        return SentencePieceTokenizer.from_file(sentencepiece_files["unigram"], extra_ids=4)
    return TikTokenizer.llama3_from_file(ranks_file)


def test_saved_folder_has_the_same_ids_and_word_starts(ours, tmp_path):
    """What a folder of Hugging Face says of itself is what the family said that wrote it."""
    ours.save_pretrained(tmp_path)
    saved = HFTokenizer(tmp_path)
    assert saved.vocab_size == ours.vocab_size and saved.sentinels == ours.sentinels
    assert saved.transformers_tokenizer.eos_token_id == saved.special_ids.eos
    for name in NAMES[:-1]:
        assert getattr(saved.special_ids, name) == getattr(ours.special_ids, name), name
    assert (saved.word_starts == ours.word_starts).all()


@pytest.mark.realdata
def test_google_t5_counts_sentinels_down(realdata, tmp_path):
    from transformers import T5Tokenizer

    shutil.copy(realdata / "tokenizers_sp" / "t5_spiece.model", tmp_path / "spiece.model")
    T5Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    tokenizer = HFTokenizer(tmp_path / "saved")
    assert tokenizer.sentinels == list(range(32_099, 31_999, -1))
    assert (tokenizer.pad, tokenizer.eos, tokenizer.vocab_size) == (0, 1, 32_100)
