"""Python's garbage collector rests while a program imports, and not after."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SOURCE = """
import gc
from megatron.util import collector
between = gc.isenabled()
collector.resume()
print(between, gc.isenabled(), gc.get_freeze_count() > 1000)
import pretrain_gpt
print(gc.isenabled())
"""


def test_the_collector_is_off_between():
    done = subprocess.run(
        [sys.executable, "-c", SOURCE], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines() == ["False True True", "True"]
