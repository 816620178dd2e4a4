"""ByteLevelTokenizer: UTF-8 and the numbering of NeMo and of 2019."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer

CONFIG = TokenizerConfig(tokenizer_type="ByteLevelTokenizer", vocab_extra_ids=2)
BYTES = ByteLevelTokenizer.from_config(CONFIG)
CHARACTERS = ByteLevelTokenizer.from_config(
    dataclasses.replace(CONFIG, tokenizer_type="CharacterLevelTokenizer")
)


@given(st.text())
def test_against_utf8(text):
    assert BYTES.tokenize(text) == list(text.encode())
    assert CHARACTERS.tokenize(text) == [8 + byte for byte in text.encode()]
    for tokenizer in (BYTES, CHARACTERS):
        (ids,) = tokenizer.tokenize_batch([text])
        assert ids.tolist() == tokenizer.tokenize(text) and ids.dtype == "int32"
        assert tokenizer.detokenize(ids) == text


def testspecial_ids():
    assert (BYTES.pad, BYTES.bos, BYTES.eos, BYTES.eod, BYTES.sentinels, BYTES.vocab_size) == (
        (256, 257, 258, 258, [259, 260], 261)
    )
    with pytest.raises(ValueError, match="of bytes has no token for the mask"):
        _ = BYTES.mask
    of_2019 = {"pad": 0, "eos": 1, "bos": 2, "sep": 4, "cls": 6, "mask": 7, "eod": 1}
    assert {name: getattr(CHARACTERS, name) for name in of_2019} == of_2019
    assert (CHARACTERS.sentinels, CHARACTERS.vocab_size) == ([264, 265], 266)
    assert BYTES.detokenize([97, 258, 259]) == "a<eos><extra_id_0>"


def test_word_starts():
    assert [BYTES.word_starts[i] for i in [*b"a \n", 258, 260]] == [0, 1, 1, 1, 1]
    assert [CHARACTERS.word_starts[i] for i in [8 + 97, 8 + 32, 0, 265]] == [0, 1, 1, 1]


@pytest.mark.parametrize("tokenizer", [BYTES, CHARACTERS], ids=["byte", "character"])
def test_against_auto_tokenizer_of_saved_folder(tokenizer, tmp_path, fuzzed_strings):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*fuzzed_strings(500, 1), "a<eos><pad><extra_id_0>"]
    wanted = [ids.tolist() for ids in tokenizer.tokenize_batch(texts)]
    assert saved(texts)["input_ids"] == wanted
    assert (saved.eos_token_id, saved.pad_token_id) == (tokenizer.eos, tokenizer.pad)
    assert len(saved) == tokenizer.vocab_size


def test_errors():
    with pytest.raises(ValueError, match="surrogates not allowed"):
        BYTES.tokenize("\ud800")
    for i in (-1, 261):
        with pytest.raises(ValueError, match=f"token id {i} is outside the vocabulary of 261"):
            BYTES.detokenize([i])
