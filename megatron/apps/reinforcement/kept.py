"""Texts of a generation with all that training needs of them, and their place in checkpoints.

Texts that are trained on in later steps are in ``state.json``, so that a run continues in the
middle of them with the same bits.

Shapes: E texts of a generation, L tokens of a text that the policy drew.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from megatron.apps.reinforcement.episodes import Episode, Prompt

Floats = npt.NDArray[np.float64]
_OF_TOKENS = "advantages_L", "returns_L", "old_L", "reference_L", "values_L"


@dataclass(frozen=True)
class RatedText:
    """A text before training on it.

    Attributes:
        number: of its sample in the order of the run.
        advantages_L: of the policy's tokens, float64, as all that follow.
        returns_L: targets of the value head; None without one.
        old_L: log-probabilities under the weights before the first step on the text; None if they
            equal the sampling ones.
        reference_L: log-probabilities under the reference model; None without one.
        values_L: what the value head expected; None without one.
        kept: False where its tokens do not count.
    """

    number: int
    episode: Episode
    advantages_L: Floats
    returns_L: Floats | None = None
    old_L: Floats | None = None
    reference_L: Floats | None = None
    values_L: Floats | None = None
    kept: bool = True


@dataclass(frozen=True)
class Rollout:
    """Texts that were written together, in the order of samples, for several steps.

    Attributes:
        number: of the generation in the run.
        iteration: steps before it was written.
        written_E: the texts.
        numbers: of all of them, for the log of the steps on them.
    """

    number: int
    iteration: int
    written_E: Sequence[RatedText]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """The generation in JSON values; the tensors as text, in the order of base64."""
        written = self.written_E
        arrays: dict[str, np.ndarray] = {
            "numbers_E": np.array([each.number for each in written], np.int64),
            "kept_E": np.array([each.kept for each in written]),
            "ended_E": np.array([each.episode.ended for each in written]),
        }
        rows: dict[str, list[np.ndarray]] = {
            "prompt": [each.episode.prompt.tokens for each in written],
            "tokens": [each.episode.tokens_L for each in written],
            "own": [each.episode.own_L for each in written],
            "log_probs": [each.episode.log_probs_L for each in written],
        }
        for name in _OF_TOKENS:
            values = [getattr(each, name) for each in written]
            if values and values[0] is not None:
                rows[name] = values
        for name, each in rows.items():
            arrays[name] = np.concatenate(each)
            arrays[f"{name} lengths"] = np.array([len(row) for row in each], np.int64)
        content = base64.b64encode(save(arrays)).decode()
        known = {"number": self.number, "iteration": self.iteration, "numbers": dict(self.numbers)}
        return known | {"texts": content}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Rollout:
        """The generation that :meth:`stored` has written, without the words of its texts."""
        arrays = load(base64.b64decode(stored["texts"]))

        def rows(name: str) -> Iterator[Any]:
            count = len(arrays["numbers_E"])
            if name not in arrays:
                return iter([None] * count)
            ends = np.cumsum(arrays[f"{name} lengths"])[:-1]
            return iter(np.split(arrays[name], ends))

        parts = {name: rows(name) for name in ("prompt", "tokens", "own", "log_probs")}
        of_tokens = {name: rows(name) for name in _OF_TOKENS}
        written = []
        for number, kept, ended in zip(
            *(arrays[name].tolist() for name in ("numbers_E", "kept_E", "ended_E")), strict=True
        ):
            prompt = Prompt(-1, next(parts["prompt"]), "")
            tokens, own, log_probs = (next(parts[n]) for n in ("tokens", "own", "log_probs"))
            episode = Episode(prompt, tokens, own, log_probs, "", ended)
            values = {name: next(each) for name, each in of_tokens.items()}
            written.append(RatedText(number, episode, kept=kept, **values))
        return cls(stored["number"], stored["iteration"], written, stored.get("numbers", {}))

    def steps(self, count: int) -> list[Sequence[RatedText]]:
        """Return the texts of each of this many steps."""
        size, rest = divmod(len(self.written_E), count)
        assert not rest
        return [self.written_E[at * size : (at + 1) * size] for at in range(count)]


class KeptTexts:
    """State of a run's texts in checkpoints, which is computed when one is saved."""

    def __init__(self) -> None:
        self.generations: dict[int, Rollout] = {}
        self.replaced = 0
        """Number of prompts so far that replaced others."""

    def keys(self) -> tuple[str, ...]:
        """Names of the values."""
        return "generations", "replaced"

    def __getitem__(self, name: str) -> Any:
        if name == "replaced":
            return self.replaced
        return [each.stored() for each in self.generations.values()]

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint has."""
        self.replaced = state["replaced"]
        each = (Rollout.of(stored) for stored in state["generations"])
        self.generations = {generation.number: generation for generation in each}

    def without_old(self, number: int) -> None:
        """Forget the generations before one."""
        for old in [n for n in self.generations if n < number]:
            del self.generations[old]
