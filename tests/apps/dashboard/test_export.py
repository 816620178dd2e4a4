"""The page of runs as one file."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from dashboards import row, train_row, write_run  # noqa: E402

from tools import dashboard  # noqa: E402


def saved(content: str) -> list[dict]:
    """The runs that a file knows."""
    (text,) = re.findall(r'<script type="application/json" id="saved">(.*?)</script>', content)
    return json.loads(text)


def test_the_command_writes_the_page_with_its_runs(tmp_path, capsys):
    path = write_run(tmp_path / "a" / "metrics.jsonl", 2500, spike=777, broken=1)
    target = tmp_path / "runs.html"
    dashboard.main([f"one={path}", "--export", str(target)])
    assert re.fullmatch(rf"{target}: 1 run, [\d,]+ bytes\n", capsys.readouterr().out)
    content = target.read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)[^"]', content)
    assert "uPlot" in content and "Permission is hereby granted" in content
    (run,) = saved(content)
    assert run["listing"]["name"] == "one" and run["listing"]["broken"] == 1
    ids = {(one["kind"], one["name"]): one["id"] for one in run["summary"]["series"]}
    loss = run["curves"][ids["train", "loss"]]
    assert (
        max(loss["y"]) == 30
        and 1000 < len(loss["x"]) < 2000
        and set(loss["smooth"]) == {"0.9", "0.99"}
    )
    expected = json.loads(train_row(loss["x"][5]))["loss"]
    assert loss["y"][5] == pytest.approx(expected, rel=1e-5)
    tokens = dict(zip(run["clocks"]["iteration"], run["clocks"]["tokens"], strict=True))
    assert tokens[2500] == 64 * 256 * 2500
    assert run["texts"][-1]["answer"] == "after 2500 steps"


def test_nothing_of_a_run_ends_the_element_it_is_in(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        train_row(1) + row("text", 1, prompt="</script><script>alert(1)", answer="<!--")
    )
    target = tmp_path / "runs.html"
    dashboard.main([str(path), "--export", str(target)])
    content = target.read_text("utf-8")
    assert "alert(1)" in content and "<script>alert" not in content
    (run,) = saved(content)
    assert run["texts"][0]["prompt"] == "</script><script>alert(1)"


@pytest.mark.parametrize("rows", ["", "hello\n", train_row(1, loss=float("nan"))])
def test_runs_without_values(rows, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(rows)
    target = tmp_path / "runs.html"
    dashboard.main([str(path), "--export", str(target)])
    assert len(saved(target.read_text("utf-8"))) == 1
    assert ("none of the 1 lines" in capsys.readouterr().err) == (rows != "")


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    path = write_run(tmp_path / "metrics.jsonl", 3)
    with pytest.raises(SystemExit) as ended:
        dashboard.main([str(path), "--export", str(tmp_path / "missing" / "runs.html")])
    assert ended.value.code == 2 and "missing" in capsys.readouterr().err
