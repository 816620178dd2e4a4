"""What setup.py gives to setuptools, which builds nothing."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, setuptools, distutils.core as core
p = core.run_setup("setup.py", stop_after="init")
names = ("package_dir", "packages", "py_modules", "package_data", "install_requires")
names += ("extras_require", "entry_points")
print(json.dumps({name: getattr(p, name) for name in names}))
"""


@cache
def setup_arguments():
    """By name: package_dir, packages, py_modules, package_data, install_requires, extras_require
    and entry_points."""
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
