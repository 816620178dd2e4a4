"""Imported before all else by a program that imports much, and told when that is done.

Loading torch, DeepSpeed and this package makes a million objects and hardly any garbage. Python's
collector looks through them again and again as they come: an eighth of the imports' time. It is
off until ``done``, which also keeps it from looking through them ever after.
"""

import gc

gc.disable()


def done() -> None:
    """Switches the collector on again, for what is made from now on."""
    gc.enable()
    gc.freeze()
