"""Imports point one way, and DeepSpeed lives in one package."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_statements import ROOT, file_of, imports, sources

BELOW = {
    "util": set(),
    "config": {"util"},
    "parallel": {"config", "util"},
    "resilience": {"config", "util", "parallel"},
    "tokenizer": {"config", "util"},
    "data": {"config", "util", "parallel", "tokenizer"},
    "corpus": {"config", "util", "tokenizer", "data"},
    "model": {"config", "util", "parallel", "tokenizer"},
    "checkpoint": {"config", "util", "parallel", "tokenizer", "model"},
    "engine": {"config", "util", "parallel", "tokenizer", "data", "model", "checkpoint"},
}
BELOW["families"] = set(BELOW["engine"])
BELOW["profiling"] = BELOW["dashboard"] = {"util"}
BELOW["objectives"] = BELOW["engine"] | {"families"}
BELOW["training"] = BELOW["engine"] | {
    "engine",
    "families",
    "objectives",
    "profiling",
    "resilience",
}
BELOW["inference"] = BELOW["training"] | {"training"}
BELOW["planning"] = BELOW["parity"] = BELOW["training"] | {"training"}
BELOW["formats"] = BELOW["training"] | {"training", "inference"}
BELOW["tasks"] = BELOW["training"] | {"training", "inference"}
BELOW["finetune"] = BELOW["tasks"] | {"tasks", "formats"}
"""What each package may import of megatron, besides itself. Packages that are not named here are
programs: nothing imports them, and they may import all."""

NAME = re.compile(r"megatron(\.\w+)+(:\w+)?")
REGISTRIES = {
    "megatron/checkpoint/source.py": frozenset({"formats"}),
    "megatron/features/adapters/model.py": frozenset({"formats"}),
    "megatron/training/build.py": frozenset({"tasks", "planning"}),
    "megatron/training/evaluation.py": frozenset({"planning"}),
    "megatron/features/epochs/passes.py": frozenset({"planning"}),
    "megatron/apps/generation/generation/command.py": frozenset({"retro"}),
}
"""Files that name modules of packages above them, which are imported when they are needed."""


def names(source: str) -> Iterator[str]:
    """Modules that a source names as text, to be imported when they are needed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            yield str(node.value).split(":")[0]


def package_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "megatron" and len(parts) > 2 else None


def faults(package: str | None, source: str, may_name: frozenset[str] = frozenset()) -> list[str]:
    """Imports and names of modules in a source that its package may not have.

    Args:
        package: where the source is.
        source: the text.
        may_name: packages whose modules it may name, besides those that it may import.
    """
    found = [m for m in imports(source) if m.split(".")[0] == "deepspeed" and package != "engine"]
    if package in BELOW:
        allowed = BELOW[package] | {package}
        found += [m for m in imports(source) if not points_down(m, allowed)]
        found += [m for m in names(source) if not points_down(m, allowed | may_name)]
    return found


def points_down(module: str, allowed: set[str]) -> bool:
    first, *rest = module.split(".")
    return first != "megatron" or not rest or rest[0] in allowed


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    may_name = REGISTRIES.get(str(path.relative_to(ROOT)), frozenset())
    assert faults(package_of(path), path.read_text(), may_name) == []


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
    packages = {p.parent.name for p in (ROOT / "megatron").glob("*/__init__.py")}
    imported = {
        name.split(".")[1]
        for path in sources()
        if (package := package_of(path))
        for name in imports(path.read_text())
        if name.startswith("megatron.") and name.split(".")[1] != package
    }
    assert imported & packages <= set(BELOW)


@pytest.mark.parametrize(
    "package, source",
    [
        ("util", "from megatron.config import ConfigError"),
        ("config", "import megatron.parallel.shard"),
        ("model", "from megatron import engine"),
        ("data", "def f():\n    from megatron.training.plan import TrainingPlan"),
        ("data", "from megatron.apps.corpus.preprocessing.inputs import open_text"),
        ("corpus", "import megatron.training.plan"),
        ("training", "from megatron.apps.corpus import preprocessing"),
        ("training", "from megatron.apps.tasks import anything"),
        ("training", "def f():\n    import deepspeed.comm"),
        (None, "from deepspeed import zero"),
        ("data", "import importlib\nimportlib.import_module('deepspeed')"),
        ("checkpoint", "from megatron.formats.huggingface import export"),
        ("engine", "def f():\n    import megatron.formats.unpickle"),
        ("engine", "resolve_name('megatron.formats.huggingface.export:write_model')"),
        ("engine", "from megatron.families import gpt"),
    ],
)
def test_the_check_finds(package, source):
    assert faults(package, source)


def test_a_registry_names_what_it_may_not_import():
    may_name = frozenset({"formats"})
    assert not faults("checkpoint", "NAMES = ['megatron.formats.unpickle:Inert']", may_name)
    assert faults("checkpoint", "NAMES = ['megatron.engine.build:build_engine']", may_name)
    assert faults("checkpoint", "import megatron.formats.unpickle", may_name)
