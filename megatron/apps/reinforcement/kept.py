"""Completions of a generation with everything that training on them needs, and their storage in
checkpoints.

Completions that later steps will train on are stored in ``state.json``, so that a run can resume
between these steps with bitwise equal results.

Shapes: E completions of a generation, L tokens of a completion that the policy sampled.
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
    """Completion with its advantages, before training. Arrays are float64 with one value per token
    of the policy.

    Attributes:
        number: number of its sample in the run.
        advantages_L: advantages.
        returns_L: targets of the value head; None without one.
        old_L: log-probabilities under the weights before the first step on the completion; None if
            they equal the sampling ones.
        reference_L: log-probabilities under the reference model; None without one.
        values_L: the value head's predictions; None without one.
        kept: False if the completion's tokens are excluded from the loss.
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
    """Completions that were generated together, in sample order, for one or more steps.

    Attributes:
        number: number of the generation in the run.
        iteration: number of training steps before the generation.
        written_E: the completions.
        numbers: metrics of all completions, logged at every step that trains on them.
    """

    number: int
    iteration: int
    written_E: Sequence[RatedText]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """Return the generation as JSON values, with the arrays encoded in base64."""
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
        """Restore a generation from the values of :meth:`stored`, without the text of prompts and
        completions."""
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
        """Split the completions evenly into ``count`` steps."""
        size, rest = divmod(len(self.written_E), count)
        assert not rest
        return [self.written_E[at * size : (at + 1) * size] for at in range(count)]


class KeptTexts:
    """Checkpoint state of a run's completions, serialized only when a checkpoint is saved."""

    def __init__(self) -> None:
        self.generations: dict[int, Rollout] = {}
        self.replaced = 0
        """Number of groups so far whose prompt was replaced by another."""

    def keys(self) -> tuple[str, ...]:
        """Return the names of the state's values."""
        return "generations", "replaced"

    def __getitem__(self, name: str) -> Any:
        if name == "replaced":
            return self.replaced
        return [each.stored() for each in self.generations.values()]

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.replaced = state["replaced"]
        each = (Rollout.of(stored) for stored in state["generations"])
        self.generations = {generation.number: generation for generation in each}

    def without_old(self, number: int) -> None:
        """Discard the generations before generation ``number``."""
        for old in [n for n in self.generations if n < number]:
            del self.generations[old]
