"""The tasks of benchmarks/reinforcement.py: what is right, and how much of it the examples show."""

import random

import pytest
import reinforcement
from reinforcement import TASKS, Learning, agrees

ANSWERS = {
    "addition": lambda prompt: str(sum(map(int, prompt.strip("=").split("+")))),
    "sorting": lambda prompt: "".join(sorted(prompt.strip("="))),
    "brackets": lambda prompt: prompt.strip("=")[::-1].translate(str.maketrans("([{<", ")]}>")),
}


@pytest.mark.parametrize("name", TASKS)
def test_at_most_one_example_in_six_is_right(name):
    """Answers are, and they fit into the length of a text with the token that ends it."""
    task, drawn = TASKS[name], random.Random(1)
    pairs = [task.draw(drawn) for _ in range(4000)]
    texts = [task.example(drawn, answer) for _, answer in pairs]
    prompts = [prompt for prompt, _ in pairs]
    if name == "grammar":
        assert sum(agrees(prompts, [answer for _, answer in pairs])) == len(pairs)
        right = sum(agrees(prompts, texts))
    else:
        assert all(ANSWERS[name](prompt) == answer for prompt, answer in pairs)
        right = sum(text == answer for text, (_, answer) in zip(texts, pairs, strict=True))
    assert 0.05 < right / len(pairs) < 0.18
    assert max(len(answer) for _, answer in pairs) < task.length


def test_a_verb_agrees_with_its_subject():
    cases = [("dogs ", "see me"), ("dogs ", "sees me"), ("cat ", "likes it"), ("cat ", "like it")]
    assert agrees(*zip(*cases, strict=True)) == [1, 0, 1, 0]
    assert agrees(["cow "], ["likes it "]) == agrees(["cow "], ["it likes"]) == [0]


def test_the_cells_of_a_run():
    """The first step is the success before; ten steps whose mean is above 90 % reach it."""
    success = [0.1] * 5 + [0.95] * 20
    assert Learning(success, 61.4).cells == ("10%", "15", "95%", "25", "61")
    assert Learning([0.5] * 30, 1).cells == ("50%", "-", "50%", "30", "1")


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    kinds = {"grpo": [[0.1, 0.9]], "grpo, one step stale": [[0.1, 0.8]]}
    reinforcement.draw({"sorting": kinds}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
