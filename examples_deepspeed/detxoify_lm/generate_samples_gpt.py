#!/usr/bin/env python
"""generate_samples_gpt.py of Megatron-LM: tools/generate.py, which has its flags."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/generate.py"), None, __name__)
