"""Helpers of these tests are modules of their folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
