"""tools/layouts.py: what it prints is what the training command does, and what the docs show."""

import json
from pathlib import Path

import pytest
from tool_modules import load_program

from megatron.apps.parity.layouts import flags_for, short_name
from megatron.config import ConfigError
from megatron.config.layouts import RULES, Layout
from megatron.run.run import parse_run

ROOT = Path(__file__).parents[3]

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 "
    "--micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mock-data"
).split()


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/layouts.py")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Resolves the command line of a layout; returns the layout, or why it is refused."""

    def start(layout):
        devices = {key: getattr(layout, key) for key in ("offload_optimizer", "offload_param")}
        zero = {key: {"device": d, "nvme_path": "/nvme"} for key, d in devices.items() if d}
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": zero}))
        monkeypatch.setenv("WORLD_SIZE", str(layout.processes))
        monkeypatch.setenv("RANK", "0")
        flags = flags_for(layout)
        if "--expert-model-parallel-size" in flags:
            flags += ["--num-experts", "8"]
        try:
            run = parse_run(None, [*MODEL, *flags, "--deepspeed_config", str(path)])
        except ConfigError as error:
            return str(error)
        return run.config.layout(run.content)

    return start


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.proof)])
def test_every_cell_is_what_the_training_command_does(tool, started, every):
    for number, (row, (_, kind)) in enumerate(zip(tool.rows(), tool.kinds(), strict=True)):
        cells = list(zip(row[1:13], tool.cells(kind), strict=True))
        for mark, layout in cells[number % every :: every]:
            found = started(layout)
            if mark == "yes":
                assert isinstance(found, Layout), (short_name(layout), found)
                assert flags_for(found) == flags_for(layout)
            else:
                rule = RULES[int(mark.removeprefix("no")) - 1]
                assert found == rule.message(layout), (short_name(layout), found)


def test_both_marks_and_every_dropout_occur(tool):
    cells = {cell for row in tool.rows() for cell in row}
    assert {"yes", "no8", "no9", "all", "hidden", "none"} <= cells


def test_the_documentation_is_what_the_command_prints(tool, capsys):
    tool.main(["--markdown"])
    assert capsys.readouterr().out == (ROOT / "docs" / "reference" / "layouts.md").read_text(), (
        "run python tools/layouts.py --markdown > docs/reference/layouts.md"
    )


def test_table_for_a_terminal(tool, capsys):
    tool.main([])
    lines = capsys.readouterr().out.splitlines()
    titles = [title for title, _ in tool.kinds()]
    assert [line[: len(title)] for line, title in zip(lines[1:], titles, strict=False)] == titles
    assert max(map(len, lines[: len(titles) + 1])) <= 128
    assert [line for line in lines if line[:1].isdigit()] == tool.reasons()
