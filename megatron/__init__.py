"""Megatron's models, data pipeline and parallel layers, trained by DeepSpeed's engine."""

import os

__version__ = "0.1.0"

if "_ARGCOMPLETE" in os.environ:  # a shell completes a command line
    import megatron.util.completion

    megatron.util.completion.skip_libraries()
