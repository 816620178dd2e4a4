"""Python's garbage collector, disabled while a program imports its libraries.

Importing torch, DeepSpeed and this package creates a million objects and hardly any garbage. The
collector would scan them repeatedly, which is an eighth of the import time. A program imports this
module before all others; the collector is then disabled until it calls ``resume``.
"""

import gc

gc.disable()


def resume() -> None:
    """Enable the collector for new objects. Existing objects are exempt from collection."""
    gc.enable()
    gc.freeze()
