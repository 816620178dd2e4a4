"""Writes the lists next to this file from setup.py: `make lock`, or with uv installed

    python requirements/lock.py [--upgrade]

Each list has one version and the hashes of its files for every package, on Linux and macOS, for all
versions of Python that setup.py allows. `base.txt` is what every installation needs but for torch,
whose build depends on the machine, `build.txt` is what builds packages that come as source, and the
others are what an extra of setup.py adds to `base.txt`. `ci.txt` is what .ci/run needs besides.
Versions stay as they are while setup.py allows them, unless --upgrade is given.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from distutils.core import run_setup  # setuptools provides it
from pathlib import Path

import setuptools  # noqa: F401

FOLDER = Path(__file__).parent
COMMAND = "make lock"
HEADER = f"# Made from setup.py by `{COMMAND}`. Install with --require-hashes --no-deps.\n"

BUILD = ["setuptools>=77.0.3", "wheel"]

TORCH = ["networkx>=2.5.1", "sympy>=1.13.3"]
"""What torch needs and nothing else here does: from this list it comes with hashes."""

CI = ["httpx", "openai", "playwright"]
"""Clients of the server, for its tests."""

NOT_LOCKED = "torch; python_version < '3'"
"""An override of what other packages require: torch is never among the packages of a list."""


def compile_list(requirements: list[str], *flags: str) -> str:
    """What uv resolves requirements to, as text."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--universal", "--python-version", "3.10"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", *flags]
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def blocks(text: str) -> list[str]:
    """The packages of a list, each with its marker and hashes."""
    return re.findall(r"^\S.*\n(?: .*\n)*", text, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="takes the newest versions")
    upgrade = parser.parse_args().upgrade

    setup = run_setup(str(FOLDER.parent / "setup.py"), stop_after="init")
    base = [one for one in setup.install_requires if not one.startswith("torch")]
    lists = {"ci": CI, **setup.extras_require}
    everything = [*BUILD, *TORCH, *base, *sum(lists.values(), [])]

    with tempfile.TemporaryDirectory() as folder:
        override, versions = Path(folder, "override.txt"), Path(folder, "versions.txt")
        override.write_text(NOT_LOCKED)
        if not upgrade:
            versions.write_text("".join(path.read_text() for path in sorted(FOLDER.glob("*.txt"))))
        common = ("--override", str(override))
        # One resolution for all, so that any lists can be installed together.
        compile_list(everything, *common, "--output-file", str(versions))
        common += ("--constraint", str(versions), "--offline")

        made = {"build": compile_list(BUILD, *common)}
        base = [*TORCH, *base]
        made["base"] = compile_list(base, *common)
        have = set(blocks(made["base"]))
        for name, requirements in lists.items():
            found = blocks(compile_list([*base, *requirements], *common))
            made[name] = "".join(block for block in found if block not in have)

    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for name, text in made.items():
        (FOLDER / f"{name}.txt").write_text(HEADER + text)
        print(f"{name}.txt: {len(blocks(text))} packages")


if __name__ == "__main__":
    sys.exit(main())
