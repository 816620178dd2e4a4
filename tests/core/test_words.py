"""The project's words: phrases that CONTRIBUTING.md replaces are nowhere, and a public class name
means one thing."""

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from import_statements import ROOT, nodes, sources

GUIDE = ROOT / "CONTRIBUTING.md"
ROW = re.compile(r"^\| (?P<old>[^|]+) \| (?P<new>[^|]+) \|$", re.MULTILINE)


def old_phrases(guide: str) -> dict[str, re.Pattern[str]]:
    """Phrases of the guide's table of words, and what finds them, also across lines and in the
    names of functions."""
    table = guide.split("| instead of | write |", 1)[1].split("\n\n", 1)[0]
    phrases = [
        phrase
        for row in ROW.finditer(table)
        if not row["old"].startswith("---")
        for phrase in row["old"].split(", ")
    ]
    gap = r"(?:[\s_#]|\"\s*f?\")+"
    return {
        phrase: re.compile(
            rf"(?<![a-z]){gap.join(map(re.escape, phrase.split()))}(?![a-z])", re.IGNORECASE
        )
        for phrase in phrases
    }


def written() -> list[str]:
    """Files of ours that people read, by their path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return [
        name
        for name in listed
        if name.endswith((".py", ".md", ".sh", ".toml", ".yml")) and (ROOT / name).is_file()
    ]


def test_old_phrases_are_gone():
    guide = GUIDE.read_text(encoding="utf-8")
    phrases = old_phrases(guide)
    assert len(phrases) > 20
    rare = {phrase: sorted(phrase.lower().split(), key=len, reverse=True) for phrase in phrases}
    names = [name for name in written() if ROOT / name != Path(__file__)]
    if not names:
        pytest.skip("git does not list the files here")
    found = []
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        if ROOT / name == GUIDE:
            text = ROW.sub("", text)
        words = text.lower()
        for phrase, pattern in phrases.items():
            # Many times as fast as the pattern; long words are rare.
            if not all(word in words for word in rare[phrase]):
                continue
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {phrase}")
    assert not found, "phrases that CONTRIBUTING.md replaces:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize(
    "text",
    ["built Anew", "for\n    # ever", 'runs for "\n    f"ever', "def test_is_no_count():"],
)
def test_phrases_are_found_across_lines_and_in_names(text):
    table = "| instead of | write |\n|---|---|\n| anew | again |\n| for ever, is no count | x |\n\n"
    assert any(pattern.search(text) for pattern in old_phrases(table).values())
    assert not any(pattern.search("canew forever") for pattern in old_phrases(table).values())


SUBJECTS = ("What", "Whether", "How", "Of", "Those", "That", "Which", "Whose", "Why", "Where", "So")
"""Words with which a docstring asks or points, instead of naming what it documents."""


def test_docstrings_begin_with_a_noun_or_a_verb():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = []
    for path in (*sources(), *(ROOT / "benchmarks").rglob("*.py")):
        for node in nodes(path.read_text(encoding="utf-8")):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and text.split(maxsplit=1)[0] in SUBJECTS:
                line = node.body[0].lineno
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not wrong, "docstrings that name nothing:\n" + "\n".join(wrong)


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in (path for path in sources() if "megatron" in path.parts):
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert len(places) > 100
    assert not twice, f"class names in several files: {twice}"


VAGUE = re.compile(r"^\s*(?:[\w, ]*, )?found(?:, \w+)*(?:: [^=\n]+)? = ", re.MULTILINE)


def test_variables_are_named_for_what_they_are():
    vague = [
        f"{path.relative_to(ROOT)}: {match.group().strip()}"
        for path in sources()
        for match in VAGUE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert vague == []
