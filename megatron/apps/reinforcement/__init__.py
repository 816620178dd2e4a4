"""Reinforcement learning: texts of the model in training, their rewards, and losses of them."""

# A configuration has the flags of every feature, including this one, so this import comes before
# any module of the package.
import megatron.config  # noqa: F401
