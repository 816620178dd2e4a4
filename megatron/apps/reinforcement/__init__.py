"""Reinforcement learning on completions that the model generates during training: generation,
rewards and losses."""

# Import the configuration before any module of this package: importing it collects the flags of
# every feature, including this one.
import megatron.config  # noqa: F401
