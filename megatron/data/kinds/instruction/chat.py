"""Examples through a chat template, rendered and tokenized by `transformers`."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.kinds.instruction.records import ANSWER, Example
from megatron.tokenizer import Tokenizer

_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Messages = list[dict[str, str]]


class ChatTemplate:
    """A chat template and the tokenizer that reads what it writes.

    Where the template marks the model's part with {% generation %}, that is the answer. Otherwise
    an answer is what a conversation up to and with it has more than the one before it, to the end
    of its last word: that holds the token that ends the turn, not the line break behind it.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        """`tokenizer` is one of `transformers`, fast."""
        self._tokenizer, self.template = tokenizer, template
        self._marks_answers = bool(_MARKS_ANSWERS.search(template))

    def encode(self, example: Example, loss_on: str) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Ids, and which of them count in the loss by --loss-on.

        Raises:
            ValueError: the template refuses the conversation, or answers cannot be told in it.
        """
        messages = [{"role": turn.role, "content": turn.text} for turn in example.turns]
        if self._marks_answers and loss_on != "everything":
            return self._by_marks(messages, loss_on)
        text = self._render(messages)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = encoded["input_ids"], np.array(encoded["offset_mapping"]).reshape(-1, 2)
        if loss_on == "everything":
            return ids, np.ones(len(ids), np.bool_)
        counted = np.zeros(len(ids), np.bool_)
        answers = [n for n, message in enumerate(messages) if message["role"] == ANSWER]
        for number in answers if loss_on == "all" else answers[-1:]:
            start, end = self._span(messages, number, text)
            counted |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
        return ids, counted

    def _by_marks(
        self, messages: Messages, loss_on: str
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        encoded = self._refusing(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        counted = np.array(encoded["assistant_masks"], np.bool_)
        if loss_on == "last" and counted.any():
            last = np.flatnonzero(counted)[-1]
            before = np.flatnonzero(~counted[:last])
            counted[: before[-1] + 1 if len(before) else 0] = False
        return encoded["input_ids"], counted

    def _span(self, messages: Messages, number: int, text: str) -> tuple[int, int]:
        """Where answer `number` is in the text of the whole conversation."""
        before = self._render(messages[:number], add_generation_prompt=True)
        until = self._render(messages[: number + 1])
        if not until.startswith(before) or not text.startswith(until):
            raise ValueError(
                f"the chat template writes message {number + 1} in another way once others follow "
                "it, so that its place cannot be told: mark the answers in the template by "
                "{% generation %} and {% endgeneration %} (--chat-template FILE), or give "
                "--loss-on last or --loss-on everything"
            )
        return len(before), len(before) + len(until[len(before) :].rstrip())

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        return self._refusing(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _refusing(self, messages: Messages, **arguments: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self.template, **arguments
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error


def own_template(tokenizer: Tokenizer) -> str | None:
    """The chat template that comes with a tokenizer."""
    of_transformers = getattr(tokenizer, "transformers_tokenizer", None)
    if of_transformers is None or not of_transformers.chat_template:
        return None
    return of_transformers.get_chat_template()


def chat_template(tokenizer: Tokenizer, template: str) -> ChatTemplate:
    """A template over any of the project's tokenizers.

    Raises:
        ValueError: the tokenizer cannot say where in a text its tokens are.
    """
    of_transformers = getattr(tokenizer, "transformers_tokenizer", None)
    if of_transformers is None:
        from transformers import AutoTokenizer  # seconds: only for whoever needs it

        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            of_transformers = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not of_transformers.is_fast:
        raise ValueError(
            "--prompt-format chat needs a tokenizer with a tokenizer.json (a fast one of "
            f"transformers); {type(of_transformers).__name__} is none"
        )
    return ChatTemplate(of_transformers, template)
