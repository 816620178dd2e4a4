"""The project stays readable: lines and files of the core, of all of it, and of its spine."""

import re
from collections import Counter
from pathlib import Path

import pytest
from import_statements import ROOT

from .test_imports import LEVEL

CORE = sorted(set(LEVEL) - {"kernels", "formats", "features", "apps"})

# Ceilings, which may only fall.
CORE_LINES, CORE_FILES = 28_319, 133
ALL_LINES, ALL_FILES = 114_980, 614
SUBJECTS = {
    "apps/migration": (2_134, 12),
    "apps/msdp": (709, 4),
    "apps/parity/symbolic": (2_436, 11),
    "apps/quickstart": (371, 3),
    "apps/reinforcement": (7_330, 41),
    "apps/tasks/retrieval": (700, 5),
    "features/averages": (258, 3),
    "features/compression": (1_906, 9),
    "features/context": (2_536, 14),
    "features/cooldown": (125, 4),
    "features/curriculum/packing": (500, 3),
    "features/experts": (4_779, 22),
    "features/global_heads": (556, 6),
    "features/latent": (953, 6),
    "features/multi_token": (391, 4),
    "features/noise_scale": (164, 3),
    "features/optimizers": (2_081, 17),
    "features/overlap": (171, 4),
    "features/qk_clip": (370, 4),
    "features/random_ltd": (508, 5),
    "features/recurrent": (2_659, 15),
    "features/retrieval": (923, 7),
    "features/tiers": (527, 4),
    "features/width": (351, 4),
    "features/z_loss": (131, 3),
    "formats/gguf": (2_010, 8),
    "formats/huggingface/classic": (722, 4),
    "formats/huggingface/decoders": (1_275, 7),
    "formats/huggingface/packed": (863, 7),
    "formats/sharded": (1_262, 4),
    "formats/trainers": (1_268, 7),
    "kernels": (1_556, 11),
}
"""Lines and files of subjects that came after the house was turned."""
SPINE_LINES, SPINE_FILES = 8_862, 35
LONGEST, SHORTEST, MOST_IN_A_FOLDER = 500, 60, 19
SHORT = {"megatron/util/collector.py"}
"""Programs, which other processes run as they are."""

PATH = re.compile(r"^\| `(\S+\.py)` \|", re.MULTILINE)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def files(*packages: str) -> list[Path]:
    return [path for name in packages for path in (ROOT / "megatron" / name).rglob("*.py")]


def shown(paths: list[Path]) -> str:
    packages = Counter(path.relative_to(ROOT / "megatron").parts[0] for path in paths)
    total = {p: sum(lines(f) for f in files(p)) for p in packages}
    return "\n".join(f"{packages[p]:4} files {total[p]:6} lines {p}" for p in sorted(packages))


@pytest.mark.parametrize(
    "packages, most_lines, most_files",
    [
        (CORE, CORE_LINES, CORE_FILES),
        (
            sorted(LEVEL),
            ALL_LINES + sum(most for most, _ in SUBJECTS.values()),
            ALL_FILES + sum(most for _, most in SUBJECTS.values()),
        ),
        *(([folder], *most) for folder, most in SUBJECTS.items()),
    ],
    ids=["core", "all", *SUBJECTS],
)
def test_the_project_does_not_grow(packages, most_lines, most_files):
    found = files(*packages)
    assert sum(map(lines, found)) <= most_lines, shown(found)
    assert len(found) <= most_files, shown(found)


def test_files_have_a_readable_size():
    sizes = {path.relative_to(ROOT): lines(path) for path in files(*LEVEL)}
    assert [path for path, size in sizes.items() if size > LONGEST] == []
    core = {p: n for p, n in sizes.items() if p.parts[1] in CORE and p.name != "__init__.py"}
    assert {str(path) for path, size in core.items() if size < SHORTEST} <= SHORT


def test_folders_have_few_files():
    folders = Counter(p.parent for p in files(*LEVEL) if p.name != "__init__.py")
    full = {str(f.relative_to(ROOT)): n for f, n in folders.items() if n > MOST_IN_A_FOLDER}
    assert full == {}


def test_the_spine_can_be_read_in_a_day():
    named = PATH.findall((ROOT / "docs/design/spine.md").read_text(encoding="utf-8"))
    assert len(set(named)) == len(named) >= 30
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert missing == []
    core = {"pretrain_gpt.py", *(str(path.relative_to(ROOT)) for path in files(*CORE))}
    assert set(named) <= core
    assert len(named) <= SPINE_FILES
    assert sum(lines(ROOT / name) for name in named) <= SPINE_LINES
