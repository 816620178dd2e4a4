"""Megatron's models, data pipeline and parallel layers, trained by DeepSpeed's engine."""

import os
import sys

__version__ = "0.1.0"

_MAIN = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or "")
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

if _MAIN.startswith((_ROOT + os.sep, os.path.join(os.path.dirname(_MAIN), "megatron-"))):
    # One of this project's programs, whose Ctrl-C is the user's; the first import of each is this.
    import megatron.util.errors

    megatron.util.errors.shorten_interrupts()

if "_ARGCOMPLETE" in os.environ:  # a shell completes a command line
    import megatron.apps.completion

    megatron.apps.completion.skip_libraries()
