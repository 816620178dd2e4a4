"""Estimated sizes of indices, against files of faiss."""

import numpy as np
import pytest
from tool_modules import load_program

from megatron.apps.retro.config import IndexFlags
from megatron.apps.retro.index import build_index
from megatron.apps.retro.index.notation import index_parts, index_size

WIDTH, COUNT = 32, 3000


@pytest.mark.parametrize(
    "text",
    [
        "Flat",
        "IVF256,Flat",
        "IVF512_HNSW32,Flat",
        pytest.param("IVF500_HNSW4,Flat", marks=pytest.mark.proof),
        "IVF64,PQ8x4",
        pytest.param("OPQ4_16,IVF128_HNSW16,PQ8x3", marks=pytest.mark.proof),
    ],
)
def test_files_are_as_large_as_estimated(text, tmp_path):
    pytest.importorskip("faiss")
    flags = IndexFlags(retro_index_str=text)
    vectors = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)
    index = build_index(flags, COUNT, WIDTH)
    index.train(vectors[:600])
    index.add(vectors)
    index.save(tmp_path / "index")
    size = (tmp_path / "index").stat().st_size
    assert index_size(index_parts(flags, COUNT, WIDTH), COUNT).file == pytest.approx(size, rel=0.01)


def test_the_table_of_codes_is_in_memory_only():
    """As faiss decides: up to 2 GiB."""
    small, large = (
        index_size(index_parts(IndexFlags(retro_index_str=text), 10**7, 256), 10**7)
        for text in ("IVF65536_HNSW32,PQ32", "IVF65537_HNSW32,PQ32")
    )
    assert small.table == small.memory - small.file == 2**31
    assert large.table == 0


def test_plan_prints_them(capsys):
    main = load_program("tools/plan.py").main
    assert main(["--retro-chunks", "1000000000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    name, per_chunk, gib = lines[3].split()[:3]
    assert name == "OPQ32_256,IVF1048576_HNSW32,PQ32"
    assert float(per_chunk) == pytest.approx(float(gib) * 2**30 / 10**9, rel=0.01)
    assert [line.split()[0] for line in lines[4:6]] == ["IVF1048576_HNSW32,Flat", "Flat"]
    assert "learns from 67,108,864 chunks; their vectors take 256.00 GiB" in lines[-1]
    with pytest.raises(SystemExit):
        main(["--retro-chunks", "1000", "--retro-index-str", "IVF64,PQ7"])
    assert "PQ7 does not divide the 1024 elements" in capsys.readouterr().err
