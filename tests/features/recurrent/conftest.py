"""Helpers of these tests are modules of their folder and of that of the experts."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "experts"):
    sys.path.insert(0, str(folder))
