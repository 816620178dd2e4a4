"""Texts that small models write, and the same texts in a pass of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from configs import run_config
from small_gpts import KINDS, VOCAB, small_config, small_gpt
from torch import Tensor

from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.reinforcement.batches import rows_of
from megatron.apps.reinforcement.episodes import Episode, Prompt
from megatron.apps.reinforcement.exact.head import drawn_numbers
from megatron.apps.reinforcement.exact.layout import PagedEpisodes, laid_out
from megatron.apps.reinforcement.exact.model import with_pages
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rollout import Writing, WritingTask, write
from megatron.families import family_of, spec_of
from megatron.model.layer_list import LayerStack, initialise

ENDS = frozenset({0, 1, 2})
TOKENIZER = SimpleNamespace(
    vocab_size=VOCAB, joins_bytes=True, detokenize=lambda ids: " ".join(map(str, ids))
)


class Talk:
    """An environment that answers the first texts with the same three tokens."""

    def __init__(self, answers: int = 2) -> None:
        self.turns: list[Any] = []
        self.reward: float | None = None
        self.left = answers

    def answered(self, text: str, room: int) -> list[int] | None:
        self.turns.append({"role": "assistant", "content": text})
        self.left -= 1
        return [3, 4, 5] if self.left >= 0 else None


@dataclass
class Numbers:
    """An objective that keeps the numbers of the head's targets."""

    temperature: float
    numbers: Any = None
    losses: dict[str, float] = field(default_factory=lambda: {"sum": 1.0})

    def __call__(self, inputs: Any, batch: Any) -> dict[str, Tensor]:
        self.numbers = drawn_numbers(inputs, self.temperature)
        return {"sum": self.numbers.log_probs_BP.sum()}


class Model:
    """A small model with weights that make some tokens much more probable than others."""

    def __init__(self, kind: str, dtype: torch.dtype, **changes: object) -> None:
        positions = {"max_position_embeddings": 256, "seq_length": 256}
        flags = KINDS.get(kind, {}) | positions | changes
        self.config = small_config(**flags)
        self.stack: LayerStack = small_gpt(torch.device("cpu"), dtype, **flags)
        with torch.no_grad():
            for name, param in self.stack.canonical_parameters():
                initialise(name, param, 1)
                param.mul_(3)
        self.spec = with_pages(spec_of(self.config))
        self.generation = family_of("gpt").generation(run_config(model=self.config), None)

    def runner(self) -> PagedRunner:
        self.stack.eval()
        stages = StagedLayers.alone(self.stack, self.config.hidden_size)
        return PagedRunner(stages, self.config, self.generation, 200, in_training=True)

    def write(
        self,
        lengths: tuple[int, ...],
        count: int,
        talks: bool = False,
        group: int = 2,
        **options: Any,
    ) -> list[Episode]:
        """Texts of at most ``count`` tokens after prompts of these lengths, ``group`` of each."""
        draw = np.random.default_rng(0)
        prompts = [Prompt(n, draw.integers(3, VOCAB, size), "") for n, size in enumerate(lengths)]
        tasks = [
            WritingTask(prompt, group * n + place, Talk() if talks else None)
            for n, prompt in enumerate(prompts)
            for place in range(group)
        ]
        options = {"temperature": 0.7} | options
        flags = ReinforcementConfig(rl="grpo", max_completion_length=count, **options)
        # A model that repeats the last token ends texts, too, which an answer follows.
        ends = ENDS | {int(prompts[0].tokens[-1])} if talks else ENDS
        written = write(self.runner(), TOKENIZER, tasks, Writing(flags, 7, ends))
        return [written[place] for place in range(len(tasks))]

    def laid_out(self, episodes: list[Episode]) -> PagedEpisodes:
        padded = self.runner()._rows.padded
        return laid_out(episodes, rows_of(episodes), padded, self.generation.max_positions)

    def trained(self, batch: Any, temperature: float = 0.7) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probabilities [B, P] of a batch's targets, and gradients of their sum by name."""
        objective = Numbers(temperature)
        self.stack.train()
        self.stack.zero_grad()
        self.stack(self.spec.begin(batch).changed(objective=objective)).losses["sum"].backward()
        grads = {n: p.grad.clone() for n, p in self.stack.canonical_parameters()}
        return objective.numbers.log_probs_BP.detach(), grads


def drawn(episodes: list[Episode]) -> Tensor:
    """Log-probabilities of the policy's tokens when they were drawn, [B, P]."""
    rows = [torch.from_numpy(each.log_probs_L[each.own_L]) for each in episodes]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
