"""Examples as plain text: Alpaca's headings, or nothing around prompts and answers."""

from __future__ import annotations

from typing import NamedTuple

from megatron.data.kinds.instruction.records import ANSWER, Example, Turn

ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
ALPACA_PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
"""As in the data of Stanford Alpaca (Taori et al. 2023)."""


class Exchange(NamedTuple):
    """A prompt and the answer that follows it."""

    prompt: str
    answer: str


def plain_exchanges(example: Example) -> list[Exchange]:
    """The texts themselves; in a conversation a line break ends each turn before an answer."""
    if example.is_pair:
        return [Exchange(example.turns[0].content, example.turns[1].content)]
    return [
        Exchange("".join(f"{turn.text}\n" for turn in prompt), answer)
        for prompt, answer in _by_answer(example)
    ]


def alpaca_exchanges(example: Example) -> list[Exchange]:
    """Under Alpaca's headings. A system message stands in place of the first sentence."""
    exchanges: list[Exchange] = []
    for prompt, answer in _by_answer(example):
        sections = []
        for turn in prompt:
            if turn.role == "system":
                sections.append(turn.content)
                continue
            if not exchanges and not sections:
                sections.append(ALPACA_PREAMBLE_WITH_INPUT if turn.context else ALPACA_PREAMBLE)
            heading = "Instruction" if turn.role == "user" else turn.role.capitalize()
            sections.append(f"### {heading}:\n{turn.content}")
            if turn.context:
                sections.append(f"### Input:\n{turn.context}")
        sections.append("### Response:\n")
        exchanges.append(Exchange("\n\n".join(sections), answer))
    return exchanges


def _by_answer(example: Example) -> list[tuple[list[Turn], str]]:
    """The turns before each answer, and the answer."""
    found: list[tuple[list[Turn], str]] = []
    before: list[Turn] = []
    for turn in example.turns:
        if turn.role == ANSWER:
            found.append((before, turn.content))
            before = []
        else:
            before.append(turn)
    return found
