"""Episodes of texts, for tests."""

import numpy as np

from megatron.apps.reinforcement.episodes import Episode, Prompt


def episode(text: str, prompt="prompt", number: int = 0, turns=(), reward=None, **columns):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return Episode(
        Prompt(number, np.array([1], np.int64), prompt, columns), tokens,
        np.ones(len(tokens), np.bool_), np.zeros(len(tokens), np.float32), text, True, turns,
        reward,
    )  # fmt: skip


class Config:
    """The section of reinforcement learning of a run."""

    def __init__(self, options):
        self.options = options

    def section(self, cls):
        assert isinstance(self.options, cls)
        return self.options
