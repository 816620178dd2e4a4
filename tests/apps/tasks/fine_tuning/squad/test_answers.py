"""Answers from logits against the procedure of BERT's run_squad.py, one span at a time."""

import math

import numpy as np
import pytest
from squad_files import squad_content, write_squad
from squad_reference import slow_prediction

from megatron.apps.tasks.fine_tuning.squad import AnswerSearch, WindowMaker
from megatron.apps.tasks.fine_tuning.squad_files import read_questions

SEQ = 40


@pytest.mark.parametrize(
    "search",
    [
        AnswerSearch(),
        AnswerSearch(4, 5),
        AnswerSearch(6, 30, True),
        AnswerSearch(20, 30, True, -1.5),
    ],
)
def test_predictions(tmp_path, pieces, search):
    negative = 0.4 if search.with_negative else 0.0
    path = write_squad(tmp_path / "dev.json", squad_content(5, 4, 4, 50, negative))
    questions = read_questions(path, search.with_negative)
    maker = WindowMaker(pieces, SEQ, 12, 12)
    rng, said = np.random.default_rng(0), []
    for windows in maker.windows(questions):
        # Some are equal, so that the order among them counts.
        logits = [np.round(rng.normal(size=(SEQ, 2)) * 3).astype(np.float32) / 2 for _ in windows]
        for row in logits:
            row[0] += 4.0 * search.with_negative
        found = search.predict(windows, logits)
        text, best, odds = slow_prediction(windows, logits, search)
        assert (found.text, found.null_odds) == (text, odds)
        assert [tuple(c) for c in found.n_best] == best
        total = sum(math.exp(s + e) for _, s, e in best)
        for entry, (words, s, e) in zip(found.n_best_entries(), best, strict=True):
            assert entry["text"] == words and (entry["start_logit"], entry["end_logit"]) == (s, e)
            assert entry["probability"] == pytest.approx(math.exp(s + e) / total)
        said.append(text)
    assert len(set(said)) > 3 and ("" in said) == search.with_negative


def test_no_span_can_be_an_answer(pieces, tmp_path):
    """The best starts come after the best ends: there is nothing to say."""
    path = write_squad(tmp_path / "dev.json", squad_content(5, 1, 1, 8))
    questions = read_questions(path, False)
    maker = WindowMaker(pieces, 60, 12, 12)
    windows = maker.windows(questions)[0]
    logits = np.zeros((60, 2), np.float32)
    logits[windows[0].text + 5, 0] = logits[windows[0].text, 1] = 9
    found = AnswerSearch(n_best_size=1).predict(windows, [logits])
    assert found.text == "" and [c.text for c in found.n_best] == [""]
