"""What lm-eval asks a model to write, as its own ``hf`` model does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from megatron.apps.generation.request import (
    Beams,
    Sampling,
    StopRules,
)
from megatron.config import ConfigError

MAX_GEN_TOKS = 256
"""Where a task gives none."""
TOP_K = 50
"""That transformers draws among, where a task gives none."""
_USED = {
    *("do_sample", "temperature", "until", "max_gen_toks", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "num_beams", "length_penalty"),
}


@dataclass(frozen=True)
class TaskGeneration:
    """A task's ``generation_kwargs``: where a text stops, how it is sampled.

    Attributes:
        until: texts at the first of which it is cut off.
        stopping: the same, and the tokens that end it.
    """

    until: tuple[str, ...]
    stopping: StopRules
    sampling: Sampling
    beams: Beams | None

    @classmethod
    def of(
        cls, kwargs: Mapping[str, Any], ends: frozenset[int], texts: Iterable[str], task: str
    ) -> TaskGeneration:
        """From a task's ``generation_kwargs``. Raises ConfigError if one of them is unknown or
        wrong.

        Args:
            ends: the tokens that end a text.
            texts: those of the tokenizer's end, which also end it where other tokens write them.
        """
        values: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), MAX_GEN_TOKS))
        unknown = sorted(set(values) - _USED)
        if unknown:
            raise ConfigError(
                f"task {task}: generation_kwargs, or --gen-kwargs, has {unknown[0]}, which is not "
                f"supported; known are {', '.join(sorted(_USED))}"
            )
        until = values["until"]
        for text in texts:
            until = handle_stop_sequences(until, text)
        until = [text for text in until if text]
        try:
            stopping = StopRules(values["max_gen_toks"], ends, tuple(until))
            return cls(tuple(until), stopping, _sampling(values), _beams(values))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task {task}: generation_kwargs, or --gen-kwargs: {error}") from None

    def text(self, written: str) -> str:
        """What of the text of the new tokens is the answer."""
        return postprocess_generated_text(written, list(self.until), None)


def _sampling(values: Mapping[str, Any]) -> Sampling:
    penalty = float(values.get("repetition_penalty", 1.0))
    if not values["do_sample"]:
        return Sampling(greedy=True, repetition_penalty=penalty)
    return Sampling(
        temperature=float(values.get("temperature", 0.0)),
        top_k=int(values.get("top_k", TOP_K)),
        top_p=float(values.get("top_p", 1.0)),
        min_p=float(values.get("min_p", 0.0)),
        repetition_penalty=penalty,
    )


def _beams(values: Mapping[str, Any]) -> Beams | None:
    width = int(values.get("num_beams", 1))
    return Beams(width, float(values.get("length_penalty", 1.0))) if width > 1 else None
