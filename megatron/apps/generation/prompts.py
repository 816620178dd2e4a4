"""From texts to the tokens that a model continues."""

from __future__ import annotations

from megatron.apps.generation.step import Runner
from megatron.tokenizer import Tokenizer


def prompt_tokens(tokenizer: Tokenizer, text: str, runner: Runner) -> tuple[int, ...]:
    """Ids of a prompt: an empty one starts a new document, and what an encoder reads ends with the
    end of a text, as in its training. Raises ValueError if the tokenizer cannot split the text, or
    has no such token."""
    if runner.max_prompt is None:
        return tuple(tokenizer.tokenize(text)) or (tokenizer.eod,)
    return (*tokenizer.tokenize_sentences([text])[0].tolist(), tokenizer.eos)
