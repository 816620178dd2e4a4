#!/usr/bin/env python
"""Megatron-DeepSpeed's name of tools/plot_runs.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.plot_runs import main  # noqa: E402

if __name__ == "__main__":
    main()
