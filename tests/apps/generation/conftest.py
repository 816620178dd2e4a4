"""Runners for the tests of generation, in this folder and those below it."""

import sys
from pathlib import Path

# importlib mode puts no folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
