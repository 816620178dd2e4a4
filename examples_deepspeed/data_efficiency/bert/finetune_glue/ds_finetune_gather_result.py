#!/usr/bin/env python
"""The program of ../finetune: results over the seeds of each task and learning rate."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).parents[1] / "finetune" / "ds_finetune_gather_result.py"
    runpy.run_path(str(program), run_name="__main__")
