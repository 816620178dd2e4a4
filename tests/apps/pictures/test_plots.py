"""The picture is made from what JsonLinesWriter writes, and says what is wrong with its input."""

from __future__ import annotations

import json
import math

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from megatron.apps.pictures.plots import plot_loss
from megatron.training.writers import JsonLinesWriter


def write_run(path):
    writer = JsonLinesWriter(path)
    for step in range(1, 41):
        loss = math.nan if step == 7 else 4 + 6 * math.exp(-step / 10)
        writer.scalars("train", step, {"loss": loss}, samples=step, tokens=1000 * step)
        if step % 10 == 0:
            clock = {"samples": step, "tokens": 1000 * step}
            writer.scalars("validation", step, {"loss": loss + 0.1}, **clock)
        if step == 20:
            writer.scalars("resume", step, {}, samples=step, tokens=20000)
    writer.close()


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn, by the call that draws it."""
    calls: dict[str, list] = {"plot": [], "axvline": [], "axhline": []}
    for name in calls:
        original = getattr(Axes, name)

        def draw(axes, *values, _name=name, _original=original, **style):
            calls[_name].append((values, style))
            return _original(axes, *values, **style)

        monkeypatch.setattr(Axes, name, draw)
    return calls


def test_curves_resume_and_entropy_are_drawn(tmp_path, drawn):
    write_run(tmp_path / "metrics.jsonl")
    output = tmp_path / "pictures" / "loss.png"
    plot_loss(tmp_path / "metrics.jsonl", output, unigram_entropy=6.43, title="a run")
    train, validation = (values for values, _ in drawn["plot"])
    assert train[0] == [1000.0 * step for step in range(1, 41)]
    assert math.isnan(train[1][6])
    assert validation[0] == [10000.0, 20000.0, 30000.0, 40000.0]
    assert validation[1] == pytest.approx([loss + 0.1 for loss in train[1][9::10]])
    assert [values for values, _ in drawn["axvline"]] == [(20000,)]
    assert [values for values, _ in drawn["axhline"]] == [(6.43,)]
    image = imread(output)
    assert image.shape[:2] == (750, 1350)
    assert image[..., :3].std() > 0.05
    assert [file.name for file in output.parent.iterdir()] == ["loss.png"]


def test_tasks_and_named_validation_sets_are_drawn(tmp_path, drawn):
    rows = [
        {"kind": "train", "iteration": n, "consumed_tokens": 10 * n, "loss": 9.0 / n}
        for n in (1, 2, 3)
    ]
    for n in (1, 3):
        clock = {"iteration": n, "consumed_samples": n, "consumed_tokens": 10 * n}
        rows += [
            {"kind": "validation books", **clock, "loss": 5.0 / n},
            {"kind": "validation code", **clock, "loss": 4.0 / n},
            {"kind": "task wikitext", **clock, "perplexity": 90.0 / n, "adjusted_perplexity": 1.0}
            | {"bits_per_byte": 2.0 / n, "token_ratio": 1.5, "examples": 7, "seconds": 0.1},
            {"kind": "task lambada", **clock, "accuracy": n / 10, "bits_per_byte": None},
            {"kind": "task plain", **clock, "perplexity": 8.0 / n, "share_of_time": 0.1},
        ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
    curves = {
        style["label"]: [list(map(float, c)) for c in points] for points, style in drawn["plot"]
    }
    assert curves.pop("lambada, nan at the end")[0] == [10, 30]
    assert curves == {
        "training, 3.00 at the end": [[10, 20, 30], [9, 4.5, 3]],
        "validation books, 1.67 at the end": [[10, 30], [5, 5 / 3]],
        "validation code, 1.33 at the end": [[10, 30], [4, 4 / 3]],
        "wikitext, 0.6667 at the end": [[10, 30], [2, 2 / 3]],
        "lambada, 0.3 at the end": [[10, 30], [0.1, 0.3]],
        "plain, 2.667 at the end": [[10, 30], [8, 8 / 3]],
    }
    assert imread(tmp_path / "loss.png").shape[0] > 1500


def test_training_rows_alone_are_enough_and_half_a_line_at_the_end_is_ignored(tmp_path, drawn):
    path = tmp_path / "metrics.jsonl"
    row = {"kind": "train", "iteration": 1, "consumed_tokens": 10, "loss": 2.0}
    path.write_text(json.dumps(row) + '\n{"kind": "tr')
    plot_loss(path, tmp_path / "loss.png")
    assert len(drawn["plot"]) == 1
    assert not drawn["axvline"] + drawn["axhline"]


def test_bad_input_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        plot_loss(tmp_path / "absent.jsonl", tmp_path / "loss.png")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="empty.jsonl: no rows of kind 'train'"):
        plot_loss(empty, tmp_path / "loss.png")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": "resume"}\nnot JSON\n')
    with pytest.raises(ValueError, match="broken.jsonl, line 2"):
        plot_loss(broken, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
