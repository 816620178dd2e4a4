"""Reinforcement learning: texts of the model in training, their rewards, and losses of them."""

# A configuration has the flags of every feature, those of this one too: whichever module of this
# package is imported first, that comes before it.
import megatron.config  # noqa: F401
