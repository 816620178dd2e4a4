"""Rows of questions against the procedure of BERT's run_squad.py, one word and token at a time."""

import pytest
from squad_files import squad_content, write_squad
from squad_reference import slow_windows

from megatron.apps.tasks.fine_tuning.squad import Passage, WindowMaker
from megatron.apps.tasks.fine_tuning.squad_files import GoldAnswer, Question, read_questions
from megatron.config import ConfigError

SEQ, STRIDE, QUERY = 40, 12, 12


@pytest.mark.parametrize("kind, negative", [("pieces", 0.0), ("pieces", 0.5), ("whole", 0.0)])
def test_windows(request, tmp_path, kind, negative):
    tokenizer = request.getfixturevalue(kind)
    path = write_squad(tmp_path / "train.json", squad_content(3, 6, 5, 50, negative))
    questions = read_questions(path, bool(negative))
    maker = WindowMaker(tokenizer, SEQ, STRIDE, QUERY)
    found = maker.windows(questions)
    most = 0
    for question, windows in zip(questions, found, strict=True):
        wanted = slow_windows(question, tokenizer, SEQ, STRIDE, QUERY)
        assert len(windows) == len(wanted)
        most = max(most, len(windows))
        for window, (row, types, span, best) in zip(windows, wanted, strict=True):
            (tokens,), (kinds,), label, _ = window.row()
            assert tokens.tolist() == row and kinds.tolist() == types and label == span
            assert window.length == len(row)
            assert window.span == span, question.identity
            assert window.best_N.tolist() == best
            assert window.text == types.index(1)
    assert most > 3
    spans = [w.span for windows in found for w in windows]
    assert sum(span == (0, 0) for span in spans) > 5 and sum(span != (0, 0) for span in spans) > 5


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Das Café in İzmir", "Café"),
        ("Das Cafe\u0301 in Izmir", "Cafe\u0301"),  # accents of their own
        ("das Straße 中文中 x", "中文"),
        ("  two\u00a0 words,\u200b here", "words"),
        ("in 1889-1990 (x)", "1990"),
        ("한국어 river", "국"),
        ("old [SEP] queen", "[SEP] queen"),
        ("the U.S. fire", "U.S."),
    ],
)
def test_the_answer_is_text_of_the_context(pieces, text, answer):
    passage = Passage.of(text, pieces)
    first, last = passage.tokens_of(text.index(answer), text.index(answer) + len(answer))
    assert passage.answer(first, last) == answer
    ids = pieces.tokenize(text)
    assert passage.tokens_T.tolist() == ids and len(passage.offsets_T2) == len(ids)


def test_a_last_window_that_is_much_shorter(whole):
    """A token is seen best in a long window even if a short one shows a little more around it."""
    asked = question("q", "river " * 300, GoldAnswer("river", 0))
    found = WindowMaker(whole, 300, 250, 8).windows([asked])[0]
    wanted = slow_windows(asked, whole, 300, 250, 8)
    assert [window.best_N.tolist() for window in found] == [best for *_, best in wanted]
    assert [len(window.best_N) for window in found] == [295, 50]


def question(identity, context, *answers, asked="queen?"):
    return Question(identity, asked, context, answers, "t.json")


def test_refused(pieces, whole):
    river = GoldAnswer("river", 0)
    maker = WindowMaker(pieces, 32, 30, 8)
    with pytest.raises(ConfigError, match="t.json: question q7: --seq-length 32 leaves .*smaller"):
        maker.windows([question("q7", "river " * 60, river)])
    # A stride matters only to texts that are cut.
    assert len(maker.windows([question("q7", "river", river)])[0]) == 1
    with pytest.raises(ConfigError, match="leaves 0 tokens"):
        long = question("q", "river", river, asked="queen queen queen queen")
        WindowMaker(whole, 6, 1, 8).windows([long])
    with pytest.raises(ValueError, match="t.json: question q8: its context has no tokens"):
        maker.windows([question("q8", "\u200b ")])
    with pytest.raises(ValueError, match="question q9: its answer .* has no tokens"):
        maker.windows([question("q9", "river \u200b", GoldAnswer("\u200b", 6))])


def test_questions_about_one_text_share_its_tokens(pieces):
    answer = GoldAnswer("river", 0)
    questions = [question(str(n), "river queen", answer) for n in range(2)]
    (first,), (second,) = WindowMaker(pieces, 32, 16, 8).windows(questions)
    assert first.passage is second.passage
