"""Python's garbage collector, at rest while a program imports.

Loading torch, DeepSpeed and this package makes a million objects and hardly any garbage. The
collector looks through them again and again as they come: an eighth of the imports' time. A
program imports this module before all others, which switches the collector off until ``resume``.
"""

import gc

gc.disable()


def resume() -> None:
    """Switches the collector on for what is made from now on; it leaves out what there is."""
    gc.enable()
    gc.freeze()
