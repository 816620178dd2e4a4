"""How memory and time of a Retro's preprocessing are measured."""

import json

import pytest
import retro_scale

pytest.importorskip("h5py")


def stage(chunks, peak_mib, seconds, size):
    return {"chunks": chunks, "peak": peak_mib * 2**20, "cpu_seconds": seconds, "bytes": size}


def test_report_extends_the_largest_corpus():
    rows = [
        {
            "chunks": chunks,
            "db-build": stage(chunks, 30, chunks / 50_000, chunks * 40),
            "query": stage(100_000, 90, 5.0, 100_000 * 160),
        }
        for chunks in (10**6, 10**7)
    ]
    lines = retro_scale.report(rows).splitlines()
    assert lines[2] == "| db-build | 1,000,000 | 30 | 20 | 40.0 |"
    assert lines[5] == "| query | 10,000,000 | 90 | 50 | 160.0 |"
    assert lines[6:] == [
        "db-build, a billion chunks: 6 CPU hours, 37 GiB of files",
        "query, a billion chunks: 14 CPU hours, 149 GiB of files",
    ]


@pytest.mark.proof
def test_a_small_corpus(tmp_path, capsys):
    """Every chunk of the corpus is in the database, and the chosen blocks are queried."""
    argv = ["--chunks", "4000", "--blocks", "1", "--json", str(tmp_path / "found.json")]
    retro_scale.main([*argv, "--folder", str(tmp_path)])
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert row["chunks"] == row["db-build"]["chunks"] == row["query"]["chunks"] == 4000
    assert 160 < row["query"]["bytes"] / 4000 < 164
    assert row["query"]["peak"] > 0 and row["query"]["cpu_seconds"] > 0
    assert "| db-build | 4,000 |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
