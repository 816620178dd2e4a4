"""What the inspection of a project shows."""

from pathlib import Path

import numpy as np
import pytest
from upstream_retro import EOD, WrittenProject, small_project

from megatron.apps.retro.inspection import RetroInspector, run_inspection
from megatron.config import ConfigError

h5py = pytest.importorskip("h5py")


@pytest.fixture
def project(tmp_path: Path) -> WrittenProject:
    return small_project(tmp_path)


def text_of(project: WrittenProject, chunk: int, length: int) -> str:
    dataset, document, start, _, _ = project.table[chunk].tolist()
    tokens = project.corpora[dataset].documents[document][start : start + length]
    return bytes(tokens[tokens != EOD].tolist()).decode()


def test_an_interactive_python(project: WrittenProject, capsys) -> None:
    retro = RetroInspector()
    with pytest.raises(ConfigError, match=r"retro\.init"):
        retro.get_db_num_chunks()
    retro.init(project.folder)
    assert retro.get_db_num_indexed_datasets() == 2
    assert [info["name"] for info in retro.get_db_indexed_dataset_infos()] == ["pages", "books"]
    assert retro.get_db_num_chunks() == len(project.table)
    assert retro.get_pt_num_samples_and_chunks("valid") == (16, 64)
    for chunk in (0, 7, len(project.table) - 1):
        assert retro.get_db_chunk_text(chunk).startswith(text_of(project, chunk, 16))
        found = retro.get_db_chunk_and_continuation_text(chunk)
        assert found.startswith(text_of(project, chunk, 32))
        source, *place = retro.get_db_chunk_place(chunk)
        assert source.endswith(project.corpora[project.table[chunk, 0]].name)
        assert place == project.table[chunk, 1:4].tolist()
    sample = retro.get_pt_sample("test", 5)
    np.testing.assert_array_equal(sample.chunks_LK, project.rows["test"][5])
    tokens = retro.get_neighbor_tokens(5, 2, "test")
    np.testing.assert_array_equal(tokens, sample.neighbors_LKR[2])
    retro.print_neighbor_texts(5, 2, "test")
    shown = capsys.readouterr().out
    known = [k for k in project.rows["test"][5, 2].tolist() if k >= 0]
    assert shown.count("  neighbour ") == len(known)
    assert all(text_of(project, chunk, 32) in shown for chunk in known)
    for call in (lambda: retro.get_db_chunk_gpt(-1), lambda: retro.get_neighbor_tokens(0, 4)):
        with pytest.raises(IndexError):
            call()


def test_the_command(project: WrittenProject, capsys) -> None:
    flags = ["--retro-project-dir", str(project.folder)]
    run_inspection(None, flags)
    shown = capsys.readouterr().out
    assert f"{len(project.table):,} chunks of 16 tokens" in shown
    assert "valid: 16 samples, 64 chunks with neighbours" in shown
    run_inspection(None, [*flags, "--part", "valid", "--sample", "3", "--neighbors", "1"])
    shown = capsys.readouterr().out
    assert [f"valid sample 3, chunk {n}:" in shown for n in range(5)] == [True] * 4 + [False]
    assert "neighbour 2" not in shown
    with pytest.raises(ConfigError, match="--sample 16: valid has the samples 0 to 15"):
        run_inspection(None, [*flags, "--part", "valid", "--sample", "16"])
    with pytest.raises(ConfigError, match="--chunk 4: a sample has the chunks 0 to 3"):
        run_inspection(None, [*flags, "--sample", "0", "--chunk", "4"])
