"""tools/schedule.py: what it prints, draws and refuses."""

import re

import pytest
from matplotlib.image import imread
from tool_modules import load_program


@pytest.fixture(scope="module")
def main():
    return load_program("tools/schedule.py").main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def shape(name: str, ranks: int, micro_batches: int) -> list[str]:
    return [
        *("--pipeline-schedule", name),
        *("--pipeline-model-parallel-size", str(ranks)),
        *("--micro-batches", str(micro_batches)),
    ]


def test_1f1b(main, capsys):
    main(shape("1f1b", 2, 3))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A column is 1 of time.")
    at = lines.index("1f1b")
    assert lines[at + 1 : at + 3] == [
        "rank 0  0a 1a .  .  0A--- 2a 1A--- .  2A---",
        "rank 1  .  0a 0A--- 1a 1A--- 2a 2A--- .  .",
    ]
    (row,) = [line.split() for line in lines if line.startswith("1f1b  ")]
    assert row == ["1f1b", "12", "25.0%", "0.333", "0.333", *"21", *"33"]


def test_interleaved(main, capsys):
    main([*shape("interleaved", 2, 4), "--num-virtual-stages-per-pipeline-rank", "3"])
    out = capsys.readouterr().out
    assert "A column is 0.333333 of time" in out
    assert "rank 0  0a 1a 0b 1b 0c 1c 2a " in out
    assert "rank 1  .  0a 1a 0b 1b 0c 0C--- 1c 1C--- " in out
    (row,) = [line.split() for line in out.splitlines() if "3 stages a rank  " in line]
    assert row[5:9] == ["13", "7.7%", "0.083", "0.083"]
    assert row[9:] == ["2.333", "1.667", "20", "20"]


def test_the_columns_of_all_schedules_are_equally_wide(main, capsys):
    main(["--micro-batches", "8", "--backward-time", "1"])
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.split("\n")[0] for block in blocks[1:4]] == [
        "1f1b", "interleaved, 2 stages a rank", "dualpipev, 2 stages a rank"
    ]  # fmt: skip
    for block in blocks[1:4]:
        _, *ranks = block.splitlines()
        assert [line[:8] for line in ranks] == [f"rank {rank}  " for rank in range(4)]
        for line in ranks:
            for direction in (str.lower, str.upper):
                times = 8 if block.startswith("1f1b") else 16
                labels = [w.strip("-") for w in line[8:].split() if w != "."]
                assert sum(label == direction(label) for label in labels) == times
    assert ".  .  .  .  0a--- 1a--- 2a--- 0b--- 3a" in blocks[3]


def test_odd_times_are_rounded_to_columns(main, capsys):
    main([*shape("1f1b", 2, 2), "--backward-time", "1.37"])
    out = capsys.readouterr().out
    assert "A column is 1 of time." in out
    assert "rank 1  .  0a 0A 1a 1A--- .\n" in out


def test_a_narrow_terminal_gets_blocks(main, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    main(shape("1f1b", 2, 3))
    text = capsys.readouterr().out.split("\n1f1b\n")[1]
    first, second, *_ = text.split("\n\n")
    assert first == "rank 0  0a 1a .  .  0A--- 2a\nrank 1  .  0a 0A--- 1a 1A---"
    assert second == "rank 0  1A--- .  2A---\nrank 1  2a 2A--- .  ."


def test_all_names_the_schedules_that_do_not_exist(main, capsys):
    main(["--micro-batches", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("interleaved: not possible. --pipeline-schedule interleaved")
    assert lines[-2].startswith("dualpipev: not possible. --pipeline-schedule dualpipev")
    assert lines[-1].startswith("dualpipev_zb: not possible. --pipeline-schedule dualpipev_zb")
    assert "1f1b" in lines and "zbh1" in lines


def test_gradients_of_weights_apart(main, capsys):
    main([*shape("zbh1", 3, 4), "--weight-time", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert "3w, 3x: gradients of weights, apart from 3A and 3B" in lines[2]
    at = lines.index("zbh1")
    assert lines[at + 1 : at + 4] == [
        "rank 0  0a 1a 2a .  .  0A--- 3a 1A--- 2A--- 3A---",
        "rank 1  .  0a 1a .  0A 2a 1A 0w 3a 2A 1w 3A 2w 3w",
        "rank 2  .  .  0a 0A 1a 1A 2a 2A 0w 3a 3A 1w 2w 3w",
    ]
    (row,) = [line.split() for line in lines if line.startswith("zbh1  ")]
    assert row == ["zbh1", "14", "14.3%", "0.167", "0.167", *"333", *"484"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev", "zbh1", "all"])
def test_picture(main, capsys, tmp_path, name):
    picture = tmp_path / "pictures" / "schedule.png"
    main([*shape(name, 4, 8), "--picture", str(picture)])
    assert f"picture: {picture}" in capsys.readouterr().out
    image = imread(picture)[..., :3]
    assert image.shape[1] == 1950
    # Forwards, backwards and waiting are there, each on more than a hundredth of the picture.
    for colour in ((0x2F, 0x5F, 0x98), (0xC9, 0x62, 0x2C), (0xEC, 0xEC, 0xEC)):
        close = (abs(image * 255 - colour) < 1.5).all(axis=-1)
        assert close.mean() > 0.01
    assert [file.name for file in picture.parent.iterdir()] == ["schedule.png"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            shape("interleaved", 4, 6),
            "6 micro batches per step .* so that every step has a multiple",
        ),
        (shape("dualpipev", 4, 7), "7 micro batches per step .* at least twice as many"),
        (shape("1f1b", 0, 8), "--pipeline-model-parallel-size 0 must be at least 1"),
        (shape("1f1b", 4, 0), "--micro-batches 0 must be at least 1"),
        (shape("gpipe", 4, 8), "--pipeline-schedule: invalid choice: 'gpipe'"),
        (["--forward-time", "0"], "--forward-time 0 must be a positive number"),
        (["--backward-time", "nan"], "--backward-time nan must be a positive number"),
        (["--weight-time", "2"], "--weight-time 2 must be positive and less than --backward-time"),
        (["--transfer-time", "-1"], "--transfer-time -1 must be "),
        (["--num-virtual-stages-per-pipeline-rank", "27"], "stages-per-pipeline-rank 27: "),
        (
            [*shape("1f1b", 4, 8), "--num-virtual-stages-per-pipeline-rank", "2"],
            "--num-virtual-stages-per-pipeline-rank 2: this schedule has one stage per process",
        ),
        (["--picture", "schedule.jpg"], "--picture schedule.jpg must end in .png"),
        (["--picture", "/dev/null/schedule.png"], "/dev/null"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(main, capsys, flags, message):
    with pytest.raises(SystemExit) as error:
        main(flags)
    assert error.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert re.search(message, line), line
