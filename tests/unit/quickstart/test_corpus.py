"""The corpus of source files."""

import json

import pytest

from megatron.quickstart.corpus import source_files, standard_library, write_corpus


@pytest.fixture
def sources(tmp_path):
    """Two good files, and one of each kind that is left out."""
    root = tmp_path / "lib"
    texts = {
        "a.py": "print('ä')\n",
        "pkg/b.py": "b = 1\n",
        "pkg/empty.py": " \n",
        "pkg/notes.txt": "no Python",
        "pkg/test/c.py": "c = 1\n",
        "site-packages/d.py": "d = 1\n",
        "encodings/e.py": "e = 1\n",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "latin1.py").write_bytes("# ä".encode("latin-1"))
    return root


def test_documents(sources, tmp_path):
    corpus = write_corpus(tmp_path / "out" / "corpus.jsonl", sources)
    texts = [json.loads(line)["text"] for line in corpus.path.read_text().splitlines()]
    assert sorted(texts) == ["b = 1\n", "print('ä')\n"]
    assert (corpus.documents, corpus.text_bytes) == (2, 6 + 12)
    assert [path.name for path in corpus.path.parent.iterdir()] == ["corpus.jsonl"]


def test_order_is_mixed_and_the_same_wherever_the_files_lie(sources, tmp_path):
    names = [path.relative_to(standard_library()) for path in source_files(standard_library())]
    assert len(names) > 100 and names != sorted(names)
    moved = tmp_path / "elsewhere"
    sources.rename(moved)
    again = [path.relative_to(moved).as_posix() for path in source_files(moved)]
    assert again == ["pkg/b.py", "pkg/empty.py", "latin1.py", "a.py"]


def test_digest_follows_the_content(sources, tmp_path):
    first = write_corpus(tmp_path / "corpus.jsonl", sources)
    assert write_corpus(tmp_path / "corpus.jsonl", sources) == first
    (sources / "a.py").write_text("other\n")
    assert write_corpus(tmp_path / "corpus.jsonl", sources).digest != first.digest


def test_no_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.py files"):
        write_corpus(tmp_path / "corpus.jsonl", tmp_path)
