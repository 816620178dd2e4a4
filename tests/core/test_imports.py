"""Imports point one way, DeepSpeed lives in one package, and no string names a module."""

import ast
import graphlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from import_statements import ROOT, closure, file_of, imports, nodes, sources

ORDER = (
    {"util", "config"},
    {"tokenizer", "kernels", "parallel"},
    {"model", "data", "checkpoint"},
    {"families", "engine"},
    {"run", "training"},
    {"formats"},
    {"features"},
    {"apps"},
)
"""Packages of megatron: each imports those of its own level and of earlier ones."""
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}

NAME = re.compile(r"megatron(\.\w+)+(:\w+)?")
TABLES = {
    "megatron/config/features.py": {"megatron.features", "megatron.apps"},
    "megatron/checkpoint/source.py": {"megatron.formats", "megatron.checkpoint.reader"},
    "megatron/formats/__init__.py": {"megatron.formats"},
}
"""The only files that name modules in strings, and the packages that these are in: the folders of
the features, and the table of the formats."""


@cache
def names(source: str) -> tuple[str, ...]:
    """Modules that a source names as text, to be imported when they are needed."""
    texts = (n.value for n in nodes(source) if isinstance(n, ast.Constant))
    return tuple(
        text.split(":")[0] for text in texts if isinstance(text, str) and NAME.fullmatch(text)
    )


def package_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "megatron" and len(parts) > 2 else None


def faults(package: str | None, source: str, may_name: frozenset[str] = frozenset()) -> list[str]:
    """Imports and names of modules in a source that its package may not have.

    Args:
        package: where the source is.
        source: the text.
        may_name: modules and packages whose modules it may name in strings.
    """
    modules = list(imports(source))
    found = [m for m in modules if m.split(".")[0] == "deepspeed" and package != "engine"]
    if package is not None:
        found += [m for m in modules if not points_down(m, package)]
        allowed = tuple(f"{name}." for name in may_name)
        found += [m for m in names(source) if not f"{m}.".startswith(allowed)]
    return found


def points_down(module: str, package: str) -> bool:
    first, *rest = module.split(".")
    return first != "megatron" or not rest or LEVEL.get(rest[0], -1) <= LEVEL[package]


@pytest.mark.parametrize("package", [None, *sorted(LEVEL)])
def test_imports_point_one_way(package):
    """None are programs and other files outside of the packages."""
    files = {str(p.relative_to(ROOT)): p for p in sources() if package_of(p) == package}
    wrong = {
        name: faults(package, path.read_text(), frozenset(TABLES.get(name, ())))
        for name, path in files.items()
    }
    assert files and not {name: each for name, each in wrong.items() if each}


def needed(feature: Path) -> set[str]:
    """Folders of features that a feature says it needs."""
    tree = ast.parse(feature.read_text())
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    values = [n.value for n in assigned if getattr(n.targets[0], "id", "") == "needs"]
    return {name for value in values for name in ast.literal_eval(value)}


@pytest.mark.parametrize("feature", sorted((ROOT / "megatron").glob("*/*/feature.py")))
def test_a_feature_imports_those_that_it_needs(feature):
    """Programs with hooks need the features that their hooks lead to, in any program."""
    folder, files = feature.parent, feature.parent.rglob("*.py")
    if (apps := folder.parent).name == "apps":
        files = (path for path in closure(feature) if apps in path.parents)
    used = {
        name.split(".")[2]
        for path in files
        for name in imports(path.read_text())
        if name.startswith("megatron.features.")
    }
    assert used - {folder.name} <= needed(feature)


def test_formats_are_named_in_their_table_alone():
    """Deleting a format's folder and its lines there leaves a trainer without that format."""
    doors = {"megatron.formats"}  # where the core finds the table
    table = ROOT / "megatron" / "formats" / "__init__.py"
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sources()
        if path != table
        for name in names(path.read_text())
        if name.startswith("megatron.formats") and name not in doors
    }
    assert found == set()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first again at the end."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def graph_of(files: dict[Path, str]) -> dict[str, set[str]]:
    """What the modules of the project import directly, for type checkers alone included."""
    return {
        str(path.relative_to(ROOT)): {
            str(found.relative_to(ROOT))
            for module in imports(source)
            if (found := file_of(module) or file_of(module.rpartition(".")[0])) and found != path
        }
        for path, source in files.items()
    }


def test_no_module_imports_itself_through_others():
    assert circle(graph_of({path: path.read_text() for path in sources()})) == []


def test_the_check_finds_a_circle():
    files = {
        ROOT / "megatron/config/layouts.py": "if T:\n    from megatron.config.run import RunConfig",
        ROOT / "megatron/config/run.py": "from megatron.config import layouts",
    }
    assert circle(graph_of(files))


def test_helpers_need_neither_torch_nor_numpy():
    """The configuration imports them, and nothing may make it slow."""
    allowed = {*sys.stdlib_module_names, "megatron", "filelock", "tqdm"}
    for path in (ROOT / "megatron/util").glob("*.py"):
        found = {module.split(".")[0] for module in imports(path.read_text())}
        assert found <= allowed, path


def test_every_package_has_a_place_in_the_order():
    assert {p.parent.name for p in (ROOT / "megatron").glob("*/__init__.py")} == set(LEVEL)


@pytest.mark.parametrize(
    "package, source",
    [
        ("util", "from megatron.model import gpt"),
        ("config", "import megatron.parallel.shard"),
        ("model", "from megatron import engine"),
        ("data", "def f():\n    from megatron.training.plan import TrainingPlan"),
        ("data", "from megatron.apps.any_app.inputs import anything"),
        ("formats", "from megatron.features import adapters"),
        ("training", "from megatron.features.any_feature import anything"),
        ("training", "from megatron.apps.any_app import anything"),
        ("features", "import megatron.apps.any_app"),
        ("training", "def f():\n    import deepspeed.comm"),
        (None, "from deepspeed import zero"),
        ("data", "import importlib\nimportlib.import_module('deepspeed')"),
        ("checkpoint", "from megatron.formats.huggingface import export"),
        ("engine", "def f():\n    import megatron.formats.unpickle"),
        ("engine", "resolve_name('megatron.formats.huggingface.export:write_model')"),
        ("apps", "resolve_name('megatron.formats.huggingface.export:write_model')"),
        ("model", "from megatron.families import gpt"),
    ],
)
def test_the_check_finds(package, source):
    assert faults(package, source)


def test_a_table_names_its_folders_alone():
    may_name = frozenset({"megatron.formats"})
    assert not faults("checkpoint", "FORMATS = 'megatron.formats'", may_name)
    assert faults("checkpoint", "NAMES = ['megatron.engine.build:build_engine']", may_name)
    assert faults("checkpoint", "import megatron.formats.unpickle", may_name)
