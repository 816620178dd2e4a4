"""Python's garbage collector, disabled while a program imports.

Loading torch, DeepSpeed and this package makes a million objects and hardly any garbage, which the
collector would scan again and again: an eighth of the imports' time. A program imports this module
before all others, which disables the collector until ``resume``.
"""

import gc

gc.disable()


def resume() -> None:
    """Enables the collector for new objects; existing ones are exempt."""
    gc.enable()
    gc.freeze()
