"""The order of the sentences that an encoder is pretrained on a second time."""

import pytest
from similar_sentences import grouped, reordered

TEXT = (
    "The old lighthouse stood alone. Nobody wanted to eat supper. "
    "A storm hit the lighthouse badly. They wanted supper after all. Too short."
)


def test_the_next_sentence_shares_most_words():
    assert list(reordered([TEXT, "A text of one sentence."])) == [
        "The old lighthouse stood alone.\n"
        "A storm hit the lighthouse badly.\n"
        "Nobody wanted to eat supper.\n"
        "They wanted supper after all."
    ]


def test_rows_that_are_alike():
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    alike = [f"How do I learn the piano in {number} weeks?" for number in range(20)]
    (first, *_) = documents = list(grouped([*alike, "Something else entirely here", alike[0]]))
    lines = "\n".join(documents).split("\n")
    assert len(first.split("\n")) == 12
    assert set(lines) <= set(alike)
    assert len(set(lines)) == len(lines)
