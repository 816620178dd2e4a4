"""Flags of reinforcement learning, resolved, for tests of their own."""

from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.settings import resolved
from megatron.config.flags import ConfigResolver, Setting


def options_of(**given):
    """The flags of a run, with the defaults of its algorithm."""
    settings = {name: Setting(value, f"flag {name}") for name, value in given.items()}
    options = ReinforcementConfig(**given)
    return resolved(options, ConfigResolver((ReinforcementConfig,), settings))
