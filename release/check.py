"""Builds the wheel and the source archive, and compares them with what they should be:
`make dist`, or

    python release/check.py [--output dist] [--tag v0.1.0]

Both are built from a copy of the files that git tracks, so that nothing else gets into them. The
wheel is built from the source archive. Contents are compared with release/wheel.txt, metadata with
this project, and twine says if a package index would show them. ``--tag`` is the tag that is to be
published: it must be the version's, and the changelog must have its date.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email.message import Message
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "release" / "wheel.txt"
LICENSES = ("LICENSE", "megatron/apps/dashboard/page/uPlot.LICENSE")
WRITTEN_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|[\w.]+\.egg-info/.+")
"""Files of a source archive that are not the repository's."""


class WrongContents(Exception):
    """A problem of what was built; the message names it."""


def tracked() -> list[str]:
    """Return the paths of all files that git tracks and that exist, but for links."""
    command = ["git", "ls-files", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [name for name in names.split("\0") if name]
    return [name for name in paths if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def in_wheel(files: Iterable[str], manifest: str) -> dict[str, str]:
    """Return the file of the repository for each path of the wheel.

    Raises:
        WrongContents: a line of the manifest names no file, or two files get one path.
    """
    contents: dict[str, str] = {}
    names = sorted(files)
    for line in manifest.splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, _, folder = (part.strip() for part in line.partition("->"))
        expression = re.compile(_expression(pattern))
        base = _fixed_part(pattern)
        chosen = [name for name in names if expression.fullmatch(name)]
        if not chosen:
            raise WrongContents(f"wheel.txt: {pattern} names no file")
        for name in chosen:
            target = name
            if folder:
                target = str(PurePosixPath(folder) / PurePosixPath(name).relative_to(base))
            if contents.setdefault(target, name) != name:
                raise WrongContents(f"{target} would be {contents[target]} and {name}")
    return contents


def _expression(pattern: str) -> str:
    """A glob as a regular expression; ``**`` stands for any folders."""
    parts = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*"}
    words = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return "".join(parts.get(word) or re.escape(word) for word in words)


def _fixed_part(pattern: str) -> str:
    """The folders of a pattern before its first star."""
    return pattern.partition("*")[0].rpartition("/")[0]


def compare(what: str, contents: Iterable[str], expected: Iterable[str]) -> None:
    """Raises WrongContents if two lists of paths differ."""
    have, want = set(contents), set(expected)
    problems = [f"lacks {name}" for name in sorted(want - have)]
    problems += [f"has {name}, which does not belong to it" for name in sorted(have - want)]
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise WrongContents(f"{what} " + "; ".join(problems[:10]) + more)


def check_wheel(path: Path, files: Iterable[str], version: str) -> None:
    """Compares a wheel with the manifest, and its metadata with this project. Raises
    WrongContents."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        folder = f"megatron_deepspeed-{version}.dist-info"
        own = [name for name in names if name.startswith(f"{folder}/")]
        expected = in_wheel(files, MANIFEST.read_text())
        compare(path.name, set(names) - set(own), expected)
        for target, source in expected.items():
            if wheel.read(target) != (ROOT / source).read_bytes():
                raise WrongContents(f"{path.name}: {target} is not {source}")
        metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        for license in LICENSES:
            name = f"{folder}/licenses/{license}"
            if name not in own or wheel.read(name) != (ROOT / license).read_bytes():
                raise WrongContents(f"{path.name} lacks the licence {license}")
    check_metadata(path.name, metadata, version)


def check_metadata(what: str, metadata: Message, version: str) -> None:
    """Raises WrongContents if metadata are not those of this project."""
    expected = {
        "Name": "megatron-deepspeed",
        "Version": version,
        "Requires-Python": ">=3.10",
        "License-Expression": "Apache-2.0 AND MIT",
    }
    for key, value in expected.items():
        if metadata[key] != value:
            raise WrongContents(f"{what}: {key} is {metadata[key]}, not {value}")
    if not str(metadata.get_payload()).strip():
        raise WrongContents(f"{what} has no description")


def check_archive(path: Path, files: Iterable[str], version: str) -> None:
    """Compares a source archive with the files of the repository. Raises WrongContents."""
    with tarfile.open(path) as archive:
        top = f"megatron_deepspeed-{version}/"
        names = [member.name for member in archive.getmembers() if member.isfile()]
    inside = [name.removeprefix(top) for name in names if name.startswith(top)]
    if len(inside) != len(names):
        raise WrongContents(f"{path.name} has files outside of {top}")
    compare(path.name, [n for n in inside if not WRITTEN_BY_SETUPTOOLS.fullmatch(n)], files)


def version() -> str:
    """Return the version, which megatron/__init__.py has."""
    text = (ROOT / "megatron" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def check_tag(tag: str) -> None:
    """Raises WrongContents if a tag is not that of the version, or the changelog has no date."""
    if tag != f"v{version()}":
        raise WrongContents(f"the tag is {tag}, and megatron/__init__.py has {version()}")
    heading = rf"^## {re.escape(version())} - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise WrongContents(f"CHANGELOG.md has no line '## {version()} - YYYY-MM-DD'")


def build(files: Sequence[str], output: Path) -> tuple[Path, Path]:
    """Return the wheel and the source archive, built from a copy of the files."""
    output.mkdir(parents=True, exist_ok=True)
    when = ["git", "log", "-1", "--format=%ct"]
    date = subprocess.run(when, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            target = Path(folder, "source", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", f"{folder}/dist"],
            cwd=f"{folder}/source", env=os.environ | {"SOURCE_DATE_EPOCH": date.strip()},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise WrongContents(f"the build has failed:\n{done.stdout}")
        made = [Path(shutil.copy(path, output)) for path in Path(folder, "dist").iterdir()]
    (wheel,) = (path for path in made if path.suffix == ".whl")
    (archive,) = (path for path in made if path.suffix == ".gz")
    return wheel, archive


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument("--tag", help="tag that is to be published")
    arguments = parser.parse_args(argv)
    files = tracked()
    try:
        if arguments.tag:
            check_tag(arguments.tag)
        wheel, archive = build(files, arguments.output)
        check_wheel(wheel, files, version())
        check_archive(archive, files, version())
    except WrongContents as error:
        sys.exit(f"release/check.py: error: {error}")
    status = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, archive])
    if status.returncode:
        sys.exit(status.returncode)
    for path in (wheel, archive):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, as release/wheel.txt says")


if __name__ == "__main__":
    main()
