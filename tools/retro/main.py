#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""tools/retro/preprocess_data.py under its name before September 2023."""

import runpy
from pathlib import Path

from megatron.util.errors import end_with_reader

if __name__ == "__main__":
    end_with_reader()
    runpy.run_path(str(Path(__file__).with_name("preprocess_data.py")), run_name="__main__")
