"""The public Python API is as it is recorded; what breaks programs that use it is named.

After a change that keeps the rules of docs/reference/support.md:

    MEGATRON_REWRITE_GOLDEN=1 pytest tests/core/test_public_api.py
"""

import os

import pytest
from public_api import RECORD, as_text, described, differences, parsed, public_names


def test_api_is_as_recorded():
    now = described(public_names())
    if os.environ.get("MEGATRON_REWRITE_GOLDEN"):
        RECORD.write_text(as_text(now))
    breaks, additions = differences(parsed(RECORD.read_text()), now)
    assert not breaks, "programs that use the public API break:\n" + "\n".join(breaks)
    assert not additions, "not recorded yet (MEGATRON_REWRITE_GOLDEN=1):\n" + "\n".join(additions)
    assert as_text(now) == RECORD.read_text(), "in another order (MEGATRON_REWRITE_GOLDEN=1)"


BEFORE = '''
from dataclasses import dataclass
@dataclass
class Reader:
    path: str
    size: int = 4
    def read(self, start: int, *, whole: bool = False) -> bytes: ...
    @property
    def length(self) -> int: ...
    def _hidden(self): ...
'''  # fmt: skip

PLANTED = {
    "a parameter without a default": ("start: int,", "start: int, stop: int,"),
    "a parameter that is gone": (", *, whole: bool = False", ""),
    "a renamed parameter": ("start: int", "begin: int"),
    "another default": ("whole: bool = False", "whole: bool = True"),
    "another result": ("-> bytes", "-> str"),
    "another order": ("start: int, *,", "*, start: int,"),
    "a method that is gone": ("def read(", "def load("),
    "a property that became a method": ("    @property\n", ""),
    "a field of another type": ("path: str", "path: bytes"),
    "a field that is gone": ("    size: int = 4\n", ""),
}
ALLOWED = {
    "a keyword with a default": ("= False)", "= False, text: bool = False)"),
    "a parameter with a default": ("start: int,", "start: int, stop: int = 0,"),
    "a new method": ("def _hidden", "def shown"),
    "a private method that is gone": ("    def _hidden(self): ...\n", ""),
}


def api_of(text, folder, name="Reader"):
    """The API of a class or function of a package with this source."""
    package = folder / f"version_{len(list(folder.iterdir()))}"
    (package / "megatron").mkdir(parents=True)
    (package / "megatron" / "planted.py").write_text(text)
    return described([f"megatron.planted.{name}"], package)


@pytest.mark.parametrize("change", PLANTED)
def test_a_planted_break_is_seen(change, tmp_path):
    old = api_of(BEFORE, tmp_path)
    assert BEFORE.count(PLANTED[change][0]) == 1
    new = api_of(BEFORE.replace(*PLANTED[change]), tmp_path)
    assert differences(old, new)[0], new


@pytest.mark.parametrize("change", ALLOWED)
def test_what_breaks_nothing_is_no_break(change, tmp_path):
    old = api_of(BEFORE, tmp_path)
    assert BEFORE.count(ALLOWED[change][0]) == 1
    new = api_of(BEFORE.replace(*ALLOWED[change]), tmp_path)
    assert differences(old, new)[0] == []
    assert parsed(as_text(new)) == new


def test_a_break_of_this_project_is_seen(tmp_path):
    """A public function that requires more, and one that is gone."""
    name = "megatron.checkpoint.source.open_checkpoint"
    recorded = parsed(RECORD.read_text())
    text = "def open_checkpoint(load, wanted, verify, device): ..."
    (planted,) = api_of(text, tmp_path, "open_checkpoint").values()
    breaks, _ = differences(recorded, recorded | {name: planted})
    assert len(breaks) == 1 and breaks[0].startswith(f"{name}: open_checkpoint(")
    without = {key: lines for key, lines in recorded.items() if key != name}
    assert differences(recorded, without)[0] == [f"{name} is gone"]


INHERITED = """
class Above:
    depth: int = 1
    def walk(self) -> int: ...
class Reader(Above):
    def walk(self) -> None: ...
"""


def test_inherited_fields_are_listed(tmp_path):
    (lines,) = api_of(INHERITED, tmp_path).values()
    assert lines == ["class Reader()", "walk(self) -> None", "depth: int = 1"]
