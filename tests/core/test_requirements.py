"""The lists of requirements/ are what setup.py asks for, whole and with hashes, and name no index;
the actions of CI have a fixed commit."""

import importlib.metadata
import platform
import re
from functools import cache
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setup_arguments import setup_arguments

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LISTS = sorted(path.stem for path in FOLDER.glob("*.txt"))

MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.9", "sys_platform": system,
     "platform_system": name, "platform_machine": machine, "os_name": "posix",
     "platform_python_implementation": "CPython", "implementation_name": "cpython", "extra": ""}
    for version in ("3.10", "3.11", "3.12", "3.13")
    for system, name, machine in (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"),
                                  ("darwin", "Darwin", "arm64"))
]  # fmt: skip


@cache
def entries(name):
    """The requirements of a list and the hashes of each."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", " ")
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(Requirement(row.split("--hash")[0]), re.findall(r"--hash=(\S+)", row)) for row in rows]


@cache
def applies(marker, number):
    """Whether a marker is true of a machine."""
    return Marker(marker).evaluate(MACHINES[number])


def versions(name, number):
    """The version of each package of a list on a machine; a package has one."""
    chosen = [one for one, _ in entries(name) if not one.marker or applies(str(one.marker), number)]
    found = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in chosen}
    assert len(found) == len(chosen), f"{name}: a package twice on {MACHINES[number]}"
    return found


@cache
def asked():
    """What setup.py asks for: `base`, and each extra."""
    given = setup_arguments()
    listed = {"base": given["install_requires"], **given["extras_require"]}
    return {name: [Requirement(one) for one in each] for name, each in listed.items()}


def test_there_is_a_list_for_every_extra():
    assert sorted({*asked(), "build", "ci"}) == LISTS


@pytest.mark.parametrize("name", LISTS)
def test_every_package_has_a_version_and_hashes_and_no_address(name):
    text = (FOLDER / f"{name}.txt").read_text()
    assert not re.search(r"https?:|file:|--(?!hash)|@", text.split("\n", 1)[1])
    assert entries(name)
    for requirement, hashes in entries(name):
        (only,) = requirement.specifier
        assert only.operator == "==" and "*" not in only.version, requirement
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes)
        assert canonicalize_name(requirement.name) != "torch"


def test_lists_have_what_setup_asks_for():
    """Within its bounds, on every machine; any lists can be installed together."""
    for machine in range(len(MACHINES)):
        base = versions("base", machine)
        for name, listed in asked().items():
            have = {**base, **(versions(name, machine) if name != "base" else {})}
            for one in listed:
                if one.name == "torch" or (one.marker and not applies(str(one.marker), machine)):
                    continue
                version = have.get(canonicalize_name(one.name))
                assert version and one.specifier.contains(version, prereleases=True), (
                    f"{name}: {one} is not in requirements/ ({version}): make lock"
                )
        together: dict[str, set[str]] = {}
        for name in LISTS:
            for package, version in versions(name, machine).items():
                together.setdefault(package, set()).add(version)
        assert not {package for package, found in together.items() if len(found) > 1}


def test_lists_are_whole():
    """What the packages themselves need is listed, because pip adds nothing (--no-deps). Read from
    those that are installed here in the listed version."""
    seen = 0
    python = ".".join(platform.python_version_tuple()[:2])
    (machine, *_) = (n for n, one in enumerate(MACHINES) if one["python_version"] == python)
    for name in LISTS:
        here = versions(name, machine)
        have = {**versions("base", machine), **here, **versions("build", machine), "torch": ""}
        for package, version in here.items():
            try:
                installed = importlib.metadata.distribution(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            if installed.version != version:
                continue
            seen += 1
            for text in installed.requires or ():
                one = Requirement(text)
                if not one.marker or applies(str(one.marker), machine):
                    assert canonicalize_name(one.name) in have, f"{name}: {package} needs {one}"
    assert seen > 40


FLOORS = {
    "aiohttp": "3.14.0",  # CVE-2026-54273
    "fsspec": "2026.5.0",  # CVE-2026-104851
    "h11": "0.15.0",  # CVE-2025-43859
    "jinja2": "3.1.5",  # CVE-2025-27516
    "nltk": "3.10.1",  # CVE-2026-62383
    "orjson": "3.11.5",  # CVE-2025-67221
    "protobuf": "6.33.4",  # CVE-2026-0994
    "pyarrow": "23.0.0",  # CVE-2026-25087
    "sentencepiece": "0.2.0",  # CVE-2026-1260
    "starlette": "1.3.0",  # CVE-2026-54283
    "tqdm": "4.66.2",  # CVE-2024-34062
    "transformers": "5.9.0",  # CVE-2026-9856
}
"""Releases with a known fault."""


@pytest.mark.parametrize("package", FLOORS)
def test_known_faults_are_not_installed(package):
    found = [one for listed in asked().values() for one in listed if one.name == package]
    assert found
    for one in found:
        assert not one.specifier.contains(FLOORS[package]), one


def test_fastokens_comes_only_when_asked_for():
    holders = [name for name in LISTS if any(one.name == "fastokens" for one, _ in entries(name))]
    assert holders == ["fast"]


def test_installing_checks_the_hashes():
    """Makefile, CI and image: no package of the lists comes another way."""
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^INSTALL = (.+)$", makefile, re.MULTILINE)
    for text in (command, (ROOT / ".ci/run").read_text(), (ROOT / "Dockerfile").read_text()):
        assert "--require-hashes --no-deps --no-build-isolation" in text
    for line in re.findall(r"pip install (.+)", makefile):
        allowed = (
            "-e .",
            "$(TORCH)",
            "$(NULL_GPU_TORCH)",
            "'uv>=",
            "'pip-audit>=",
            "--require-hashes",
        )
        assert any(word in line for word in allowed), line
    for step in re.findall(r"pip install (.+)", (ROOT / ".ci/run").read_text()):
        assert "--require-hashes" in step


def test_actions_have_a_commit_and_no_permissions():
    for path in (ROOT / ".github/workflows").iterdir():
        text = path.read_text()
        used = re.findall(r"uses: (.+)", text)
        assert used
        for one in used:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one), one
        assert re.findall(r"^ *permissions:\n((?:  +.+\n)+)", text, re.M) == ["  contents: read\n"]
        assert text.count("persist-credentials: false") == text.count("actions/checkout@")
