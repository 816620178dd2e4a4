"""The text of word-level corpora, from their words."""

import pytest

from megatron.apps.tasks.zeroshot.texts import detokenizer_of

WIKI = {
    "the wolves ' den": "the wolves' den",
    "dogs 's": "dogs's",
    "a well @-@ known 1 @,@ 000 and 3 @.@ 5 %": "a well-known 1,000 and 3.5 %",
    "one , two ; three : four . Five ! Six ? Seven": "one, two; three: four. Five! Six? Seven",
    "( 24 in ) [ note ] { set }": "(24 in) [note] {set}",
    'he said " yes , no " and " so "': 'he said "yes, no" and "so"',
    "called ' big ' by": "called 'big' by",
    " = = = Deep = = = \n \n = = Mid = = \n": " === Deep ===\n\n== Mid ==\n",
    "20 ° C": "20°C",
    "N N N": "N 1 N",
    "it 's": "it's",
    "( two\nlines )": "(two\nlines)",
    "open ( never closed": "open ( never closed",
    "of / ' 5 /": "of / ' 5 /",
}
PTB = {
    "do n't say 'it ' s": "don't say'it' s",
    " no it was n't black \n more \n": " no it wasn't black\nmore\n",
    "about N years": "about1 years",
    "$ 1 and # 1": "$1 and #1",
}


@pytest.mark.parametrize("words, text", WIKI.items())
def test_wikitext(words, text):
    name, detokenize = detokenizer_of("data/wikitext-103/wiki.test.tokens")
    assert name == "wiki" and detokenize(words) == text


@pytest.mark.parametrize("words, text", PTB.items())
def test_ptb(words, text):
    name, detokenize = detokenizer_of("ptb/ptb.test.txt")
    assert name == "ptb" and detokenize(words) == text


@pytest.mark.parametrize(
    "path, name",
    [
        ("wiki/ptb.txt", "ptb"),
        ("lambada/wiki.txt", "wiki"),
        ("data/lambada.jsonl", "lambada"),
        ("WikiText/test.txt", None),
    ],
)
def test_the_first_of_the_known_words_in_the_whole_path_counts(path, name):
    found, detokenize = detokenizer_of(path)
    assert found == name
    assert name in ("ptb", "wiki") or detokenize("a , b") == "a , b"
