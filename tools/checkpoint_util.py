#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""tools/checkpoint/util.py under its name before September 2023 and in Megatron-DeepSpeed."""

import runpy
from pathlib import Path

from megatron.util.errors import end_with_reader

if __name__ == "__main__":
    end_with_reader()
    runpy.run_path(str(Path(__file__).parent / "checkpoint" / "util.py"), run_name="__main__")
