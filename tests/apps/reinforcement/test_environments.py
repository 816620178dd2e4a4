"""Environments: tokens of their messages against whole conversations of chat templates; the
examples; failures."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import megatron.config  # noqa: F401
from megatron.apps.reinforcement.episodes import Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.environments import Environments
from megatron.apps.reinforcement.rewards.tools import tool_calls
from megatron.config import ConfigError
from megatron.features.instruction.flags import InstructionConfig

from ...features.instruction.conftest import CHATML, Built

EXAMPLES = Path(__file__).parents[3] / "examples_deepspeed/rl/environments.py"
HOSTILE = """
import time
class Echo:
    def reset(self, prompt): self.count = 0
    def step(self, text):
        self.count += 1
        if text == "loop":
            while True: pass
        if text == "wrong": return 5
        if text == "nan": return [], float("nan"), True
        return f"{self.count} {text}", 0.5, text == "end"
"""


@pytest.fixture
def environments(tmp_path):
    made = []

    def make(built: Built, environment: str, **flags) -> Environments:
        options = ReinforcementConfig(rl="grpo", environment=environment, **flags)
        config = SimpleNamespace(
            section=lambda cls: options if cls is ReinforcementConfig else InstructionConfig(),
            tokenizer=built.config,
            model=SimpleNamespace(seq_length=2048),
        )
        ends = [built.tokenizer.eod, *built.tokenizer.tokenize("<|im_end|>")]
        made.append(Environments.of(config, built.tokenizer, frozenset(ends[:2])))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt_of(built: Built, text, **columns) -> Prompt:
    tokenizer = built.tokenizer
    if isinstance(text, str):
        tokens = tokenizer.tokenize(text)
    else:
        tokens = tokenizer.transformers_tokenizer.apply_chat_template(
            list(text), add_generation_prompt=True, return_dict=False
        )
    return Prompt(0, np.array(tokens, np.int64), text, columns)


def test_tokens_are_those_of_the_whole_conversation(with_template, environments) -> None:
    """The model reads exactly the text that the chat template makes of all messages."""
    built = with_template(CHATML)
    game = environments(built, f"{EXAMPLES}:Guessing")
    first = {"role": "user", "content": "Let us play."}
    episode = game.begin(prompt_of(built, (first,), secret=30))
    opening = {"role": "user", "content": "Guess a number from 1 to 100."}
    apply = built.tokenizer.transformers_tokenizer.apply_chat_template
    read = episode.prompt.tokens.tolist()
    assert read == apply([first, opening], add_generation_prompt=True, return_dict=False)
    said = [first, opening]
    for guess, hint in (("is it 50?", "It is smaller."), ("20", "It is larger.")):
        own = [*built.tokenizer.tokenize(guess), *built.tokenizer.tokenize("<|im_end|>")]
        answer = episode.answered(guess, 1000)
        read += [*own, *answer]
        said += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
        assert read == apply(said, add_generation_prompt=True, return_dict=False)
        assert episode.reward == 0.0
    assert episode.answered("then 30", 1000) is None
    assert episode.reward == pytest.approx(0.8)
    assert [turn["content"] for turn in episode.turns] == [
        "is it 50?", "It is smaller.", "20", "It is larger.", "then 30",
    ]  # fmt: skip


def test_plain_texts_follow_a_line_each(gpt2: Built, environments) -> None:
    game = environments(gpt2, f"{EXAMPLES}:Guessing")
    episode = game.begin(prompt_of(gpt2, "Play: ", secret=30))
    read = gpt2.tokenizer.detokenize(episode.prompt.tokens.tolist())
    assert read == "Play: Guess a number from 1 to 100.\n"
    answer = episode.answered("40", 1000)
    assert gpt2.tokenizer.detokenize(list(answer)) == "It is smaller.\n"


def test_a_calculator_is_called(with_template, environments) -> None:
    built = with_template(
        CHATML.replace("message['role'] }}", "message['role'] }} {{ message.name }}")
    )
    tool = environments(built, f"{EXAMPLES}:Calculator")
    episode = tool.begin(prompt_of(built, ({"role": "user", "content": "2*(3+4)?"},), answer=14))
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2*(3+4)"}}</tool_call>'
    assert "14" in built.tokenizer.detokenize(list(episode.answered(call, 1000)))
    assert episode.turns[1] == {"role": "tool", "name": "calculate", "content": "14"}
    for bad in ('{"name": "run"}', "{", '{"name": "calculate", "arguments": {"expression": "x"}}'):
        assert episode.answered(f"<tool_call>{bad}</tool_call>", 1000) is not None
        assert episode.turns[-1]["content"].startswith("error: ")
    assert episode.answered("It is 14", 1000) is None and episode.reward == 1.0


def test_calls_of_texts() -> None:
    text = 'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>\n{"name": "g"}'
    assert tool_calls(text) == [("f", {"x": 1}, ""), ("g", {}, "")]
    assert [call.problem[:8] for call in tool_calls("<tool_call>x</tool_call>")] == ["the call"]
    assert tool_calls("none") == []


def test_failures_are_named_and_others_continue(gpt2: Built, environments, tmp_path) -> None:
    file = tmp_path / "echo.py"
    file.write_text(HOSTILE)
    game = environments(gpt2, f"{file}:Echo", reward_timeout=0.5, max_turns=3)
    prompt = prompt_of(gpt2, "Play: ")
    other = game.begin(prompt)
    assert other.answered("a", 1000) is not None
    for text in ("loop", "wrong", "nan"):
        episode = game.begin(prompt)
        assert episode.answered(text, 1000) is None and math.isnan(episode.reward)
    assert [failure[:11] for failure in game.failures] == [
        "took more t",
        "returned 5 ",
        "returned na",
    ]
    # The process was ended within: the episode has its history in the next one.
    other.answered("b", 1000)
    assert other.turns[-1]["content"] == "2 b" and other.reward == 1.0
    assert other.answered("c", 1000) is None  # --max-turns


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("nothing.py:Echo", "nothing.py is not a file"),
        ("Echo", "must be FILE.py:CLASS"),
        (f"{EXAMPLES}:Missing", "has no function Missing"),
    ],
)
def test_wrong_flags_are_named(flag: str, message: str, gpt2: Built, environments) -> None:
    with pytest.raises(ConfigError, match=message):
        environments(gpt2, flag)
