"""The modules of benchmarks/, which is no package that is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
