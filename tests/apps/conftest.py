"""Fixtures that these tests share with others."""

from gpt_checkpoints import canonical, gpt_config, random_gpt, write_checkpoint

__all__ = ["canonical", "gpt_config", "random_gpt", "write_checkpoint"]
