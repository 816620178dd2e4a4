"""Lets the tests of this folder import the traces that it builds."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
