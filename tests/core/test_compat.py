"""The old module names in compat/."""

import re

from import_statements import ROOT
from setuptools import find_namespace_packages

COMPAT = ROOT / "compat"
MODULES = sorted(path.relative_to(COMPAT) for path in COMPAT.rglob("*.py"))


def test_every_name_is_installed_and_listed():
    """setup.py installs the packages; the table says whose name each module is."""
    table = (COMPAT / "README.md").read_text()
    listed = re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)
    packages = find_namespace_packages(str(COMPAT))
    for module in MODULES:
        assert str(module.parent) in packages, f"{module} is in no package"
        name = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
        assert any(f"{a}.".startswith(f"{b}.") for n in listed for a, b in ((n, name), (name, n)))


def test_no_name_hides_another():
    """They are installed next to the project's own."""
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("*/"))}
    assert not ours & {module.parts[0] for module in MODULES}
