"""train.json, dev.json, test.json and where each of their lines is from."""

import pytest

from megatron.apps.corpus.collection.reshaping import FILES, ShuffledSplitConfig, shuffled_split
from megatron.config import ConfigError


def test_every_document_is_in_one_part(tmp_path):
    inputs = [tmp_path / "a.json", tmp_path / "b.json"]
    inputs[0].write_text("".join(f'{{"text": "a{n}"}}\n' for n in range(13)) + "\n")
    inputs[1].write_text('\n{"text": "é"}\n{"text": "end"}')
    lines = [path.read_text().split("\n") for path in inputs]
    config = ShuffledSplitConfig(tuple(map(str, inputs)), str(tmp_path / "out"), (0.2, 0.05))
    assert shuffled_split(config) == "11 in train.json, 3 in dev.json, 1 in test.json"
    seen = []
    for name in FILES:
        part = (tmp_path / "out" / name).read_text().splitlines()
        header, *rows = (tmp_path / "out" / f"{name}.map").read_text().splitlines()
        places = [tuple(map(int, row.split("\t"))) for row in rows]
        assert header == "file\tline #" and [lines[f][n] for f, n in places] == part
        seen += places
    assert sorted(seen) == [*((0, n) for n in range(13)), (1, 1), (1, 2)] != seen
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        f"{name}{end}" for name in FILES for end in ("", ".map")
    )


@pytest.mark.parametrize("shares", [(0.9, 0.2), (-0.1,), (0.1, 0.1, 0.1)])
def test_shares_that_are_not_fractions(tmp_path, shares):
    (tmp_path / "a.json").write_text("{}\n")
    config = ShuffledSplitConfig((str(tmp_path / "a.json"),), str(tmp_path), shares)
    with pytest.raises(ConfigError, match="--test-percent .* with a sum of at most 1"):
        shuffled_split(config)
