"""A hint names what is most like a word, or says nothing."""

from megatron.config.flags import nearest


def test_the_nearest_name_is_in_the_hint():
    assert nearest("--hiden-size", ["--hidden-size", "--size"], "; {}?") == "; --hidden-size?"


def test_nothing_alike_is_no_hint():
    assert nearest("xyz", ["--hidden-size"], "; {}?") == ""
    assert nearest("abcd", ["ab__"], "{}", cutoff=0.5) == "ab__"
    assert nearest("abcd", ["ab__"], "{}") == ""
