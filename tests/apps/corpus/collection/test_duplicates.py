"""Near-duplicates, against a slow comparison of all pairs, and groups, against networkx."""

import json
import random
from itertools import combinations

import networkx
import numpy as np
import pytest

from megatron.apps.corpus.collection.duplicates import (
    DuplicateConfig,
    GroupConfig,
    RemoveConfig,
    find_duplicates,
    group_duplicates,
    read_pairs,
    remove_duplicates,
)
from megatron.apps.corpus.collection.fingerprints import shingle_hashes, signature_S, similarity
from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.config import ConfigError


def prose(rng: random.Random, words: int = 120) -> str:
    """Words of a small language, so that unrelated texts share some shingles, as real ones do."""
    syllables = ["ba", "ton", "ri", "sel", "mo", "ka", "lin", "der", "fu", "pas", "gre", "vi"]
    return " ".join("".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(words))


def edited(rng: random.Random, text: str, share: float) -> str:
    """With so many of the words replaced."""
    words = text.split(" ")
    for i in rng.sample(range(len(words)), round(share * len(words))):
        words[i] = prose(rng, 1)
    return " ".join(words)


def shingles(text: str) -> set[str]:
    return {text[i : i + 5] for i in range(len(text) - 4)} or ({text} - {""})


def jaccard(a: set[str], b: set[str]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common)


def search(files, records, key="id", workers=1, **flags):
    """Pairs of ids to similarity, and the report."""
    path = files.lines("a.jsonl", records)
    config = DuplicateConfig((path, key), files / "pairs.json", **flags)
    report = find_duplicates(config, LineJobConfig(workers=workers))
    return {(a, b): v for a, b, v in read_pairs(files.folder / "pairs.json")}, report


@pytest.fixture(scope="module")
def planted() -> tuple[list[dict], dict[tuple[str, str], float]]:
    """220 documents, half of them edits of others by 0 to 20 %, and all pairs of J >= 0.5."""
    rng = random.Random(5)
    texts = [prose(rng) for _ in range(110)]
    texts += [edited(rng, text, rng.uniform(0, 0.2)) for text in texts]
    order = list(range(220))
    rng.shuffle(order)
    records = [{"id": f"d{i}", "text": texts[i]} for i in order]
    sets = [shingles(record["text"]) for record in records]
    pairs = {
        (records[i]["id"], records[j]["id"]): value
        for i, j in combinations(range(220), 2)
        if (value := jaccard(sets[i], sets[j])) >= 0.5
    }
    return records, pairs


def test_recall_and_precision(files, planted):
    """Precision is 1 and the similarities are exact. Of pairs with J >= 0.7 the default signature
    finds at least 99 % in theory (1 - (1 - 0.7^6)^42 = 0.9948)."""
    records, reference = planted
    found, report = search(files, records)
    wanted = {pair: value for pair, value in reference.items() if value >= 0.7}
    assert 50 < len(wanted) < len(reference)  # some lie on either side of the threshold
    assert found == {pair: wanted[pair] for pair in found}
    assert len(found) >= 0.99 * len(wanted)
    assert report.pairs == len(found) and report.documents == 220
    assert report.verified < 2 * len(reference)
    assert files.names() == {"a.jsonl", "pairs.json"}


def test_more_bands_find_all_down_to_one_half(files, planted):
    records, reference = planted
    found, _ = search(files, records, threshold=0.5, num_seeds=256, num_bands=64)
    assert len(found) >= 0.98 * len(reference)  # 1 - (1 - 0.5^4)^64 = 0.984
    assert found == {pair: reference[pair] for pair in found}


def test_candidates_are_as_many_as_theory_says(files):
    """J about 0.5, 5 bands of 4 values: 1 - (1 - J^4)^5 of the pairs; within 4 deviations."""
    rng = random.Random(6)
    texts = [prose(rng) for _ in range(400)]
    copies = [edited(rng, text, 0.35) for text in texts]
    values = [jaccard(shingles(a), shingles(b)) for a, b in zip(texts, copies, strict=True)]
    chances = np.array([1 - (1 - value**4) ** 5 for value in values])
    records = [{"id": str(i), "text": text} for i, text in enumerate([*texts, *copies])]
    found, _ = search(files, records, threshold=0.2, num_seeds=20, num_bands=5)
    hits = sum((str(i), str(i + 400)) in found for i in range(400))
    deviation = (chances * (1 - chances)).sum() ** 0.5
    assert 0.4 < np.mean(values) < 0.6
    assert abs(hits - chances.sum()) < 4 * deviation


def test_signatures_estimate_similarity():
    """Equal values of two signatures, against the Jaccard of planted sets: mean and deviation."""
    rng = np.random.default_rng(0)
    for planted in (0.2, 0.5, 0.9):
        errors = []
        for i in range(100):
            letters = "".join(chr(c) for c in rng.integers(0x4E00, 0x9000, 600))
            kept = round(2 * planted / (1 + planted) * 600)
            other = letters[:kept] + "".join(
                chr(c) for c in rng.integers(0x4E00, 0x9000, 600 - kept)
            )
            exact = jaccard(shingles(letters), shingles(other))
            rows = [signature_S(text, 252, i) for text in (letters, other)]
            errors.append((rows[0] == rows[1]).mean() - exact)
        deviation = (planted * (1 - planted) / 252) ** 0.5
        assert abs(np.mean(errors)) < 4 * deviation / 10
        assert 0.7 * deviation < np.std(errors) < 1.3 * deviation


@pytest.mark.parametrize("text", ["", "a", "abcd", "abcde", "ababababab", "ä€😀ä€😀ä€😀", "x" * 99])
def test_shingles(text):
    assert len(np.unique(shingle_hashes(text))) == len(shingles(text))


@pytest.mark.parametrize("kind", ["union", "min", "max"])
def test_similarity(kind):
    a, b = "the quick brown fox jumps", "the quick brown dog sleeps on and on"
    x, y = shingles(a), shingles(b)
    whole = {"union": len(x | y), "min": min(len(x), len(y)), "max": max(len(x), len(y))}[kind]
    found = similarity(np.unique(shingle_hashes(a)), np.unique(shingle_hashes(b)), kind)
    assert found == len(x & y) / whole
    nothing = shingle_hashes("")
    assert (
        similarity(nothing, nothing, kind) == 1
        and similarity(nothing, shingle_hashes("a"), kind) == 0
    )


def test_contained_documents_by_min(files):
    rng = random.Random(7)
    whole = prose(rng, 200)
    records = [{"id": "whole", "text": whole}, {"id": "part", "text": whole[: len(whole) // 2]}]
    assert search(files, records)[0] == {}
    found, _ = search(files, records, jaccard="min")
    assert found == {("whole", "part"): 1.0}


@pytest.mark.parametrize("copies", [10, 300])
def test_many_copies_of_one_page(files, copies):
    """A bucket of more than 50 is not searched pair by pair, and yet is one group."""
    rng = random.Random(8)
    page = prose(rng)
    texts = [edited(rng, page, 0.01) for _ in range(copies)] + [prose(rng) for _ in range(20)]
    texts += ["", "", ""]
    found, report = search(files, [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    group_duplicates(GroupConfig(files / "pairs.json", files / "groups.json"), LineJobConfig())
    groups = [names for line in files.records("groups.json") for names in line.values()]
    assert sorted(map(sorted, groups), key=len) == [
        sorted(str(copies + 20 + i) for i in range(3)),
        sorted(str(i) for i in range(copies)),
    ]
    assert len(found) < 50 * copies


def test_any_number_of_workers(files, planted):
    records, _ = planted
    first, _ = search(files, records)
    text = files.read("pairs.json")
    search(files, records, workers=2)
    assert first and files.read("pairs.json") == text


def test_several_files_and_kept_fingerprints(files, planted):
    records, _ = planted
    whole, _ = search(files, records)
    parts = [files.lines(f"p{i}.jsonl.gz", records[i * 100 : i * 100 + 100]) for i in range(3)]

    def run(inputs, **flags):
        words = tuple(word for path in inputs for word in (path, "id"))
        find_duplicates(DuplicateConfig(words, files / "b.json", **flags), LineJobConfig())
        return {(a, b): v for a, b, v in read_pairs(files.folder / "b.json")}

    assert run(parts) == whole
    kept = files / "kept"
    run(parts[:2], save_fingerprints=kept)
    assert run(parts[2:], load_fingerprints=(kept,)) == whole
    with pytest.raises(ValueError, match="cannot be compared"):
        run(parts[2:], load_fingerprints=(kept,), seed=1)
    (files.folder / "kept/0001/texts.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="kept/0001 is damaged"):
        run(parts[2:], load_fingerprints=(kept,))


def test_fingerprints_of_a_stopped_run_are_used(files, planted, monkeypatch):
    from megatron.apps.corpus.collection import duplicates, fingerprints

    class Killed(BaseException):
        pass

    def dying(*_args):
        raise Killed

    records, _ = planted
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(duplicates.DuplicateSearch, "pairs", dying)
        search(files, records)
    assert not (files.folder / "pairs.json").exists()

    def refuse(*_args):
        raise AssertionError("fingerprints were made again")

    config = DuplicateConfig((files / "a.jsonl", "id"), files / "pairs.json")
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "_fingerprint_step", refuse)
        find_duplicates(config, LineJobConfig())
    assert files.names() == {"a.jsonl", "pairs.json"}
    again = files.read("pairs.json")
    search(files, records)
    assert files.read("pairs.json") == again


def test_an_id_that_occurs_twice(files):
    with pytest.raises(ValueError, match="the id 'x' occurs twice"):
        search(
            files, [{"id": "x", "text": "a"}, {"id": "y", "text": "b"}, {"id": "x", "text": "c"}]
        )


def test_a_record_without_id(files):
    records = [{"id": "x", "text": "a"}, {"text": "b"}]
    with pytest.raises(ValueError, match='a.jsonl, line 2: no key "id"'):
        search(files, records)
    config = DuplicateConfig((files / "a.jsonl", "id"), files / "pairs.json")
    assert find_duplicates(config, LineJobConfig(on_bad_line="skip")).documents == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"inputs": ("a",)}, "must be pairs"),
        ({"inputs": ()}, "--inputs is missing"),
        ({"output": None}, "--output is missing"),
        ({"threshold": 1.5}, "--threshold 1.5"),
        ({"num_bands": 10}, "--num-seeds 252 must be a multiple of --num-bands 10"),
    ],
)
def test_refused_flags(flags, message):
    config = DuplicateConfig(**{"inputs": ("a", "id"), "output": "b", **flags})
    with pytest.raises(ConfigError, match=message):
        config.check()


@pytest.mark.parametrize("seed", range(5))
def test_groups_against_networkx(files, seed):
    rng = random.Random(seed)
    pairs = [
        (f"n{rng.randrange(80)}", f"n{rng.randrange(80, 160)}", rng.random()) for _ in range(90)
    ]
    files.lines("pairs.json", [{a: [{b: v}]} for a, b, v in pairs])
    config = GroupConfig(files / "pairs.json", files / "groups.json", 0.4)
    report = group_duplicates(config, LineJobConfig())
    graph = networkx.Graph([(a, b) for a, b, v in pairs if v >= 0.4])
    groups = [names for line in files.records("groups.json") for names in line.values()]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, networkx.connected_components(graph)))
    assert (report.groups, report.documents) == (len(groups), len(graph))


def test_groups_refuse_other_files(files):
    path = files.lines("pairs.json", [{"a": [{"b": 0.9}]}, {"a": "b"}])
    with pytest.raises(ValueError, match=f"{path}, line 2: not"):
        group_duplicates(GroupConfig(path, files / "groups.json"), LineJobConfig())


def test_removal_keeps_the_first_of_each_group(files, planted):
    records, _ = planted
    found, _ = search(files, records)
    group_duplicates(GroupConfig(files / "pairs.json", files / "groups.json"), LineJobConfig())
    report = remove_duplicates(
        RemoveConfig(
            files / "groups.json",
            (files / "a.jsonl",),
            files / "unique.jsonl",
            removed=files / "removed.jsonl",
            id_key="id",
        ),
        LineJobConfig(),
    )
    kept = {r["id"] for r in files.records("unique.jsonl")}
    position = {record["id"]: i for i, record in enumerate(records)}
    for component in networkx.connected_components(networkx.Graph(list(found))):
        assert kept & component == {min(component, key=position.__getitem__)}
    assert {r["id"] for r in files.records("removed.jsonl")} == set(position) - kept
    assert [r["id"] for r in records if r["id"] in kept] == [
        r["id"] for r in files.records("unique.jsonl")
    ]
    assert report.counts["documents left out"] + len(kept) == 220
    again, _ = search(files, files.records("unique.jsonl"))
    assert again == {}


def test_removal_refuses_other_files(files):
    groups = files.lines("groups.json", [{"0": "a"}])
    data = files.lines("a.jsonl", [{"url": "a", "text": "x"}])
    with pytest.raises(ValueError, match=f"{groups}, line 1: not"):
        remove_duplicates(RemoveConfig(groups, (data,), files / "b.jsonl"), LineJobConfig())


@pytest.mark.realdata
def test_planted_in_real_text(files, realdata):
    """300 documents of OpenWebText and edits of 60 of them: all edits and no others are found."""
    source = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"
    texts = [json.loads(line)["text"] for line in source.open()][:300]
    rng = random.Random(9)
    edits = [(i, edited(rng, texts[i], 0.03)) for i in range(0, 300, 5)]
    records = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    records += [{"id": f"edit of {i}", "text": text} for i, text in edits]
    found, _ = search(files, records)
    sets = {r["id"]: shingles(r["text"]) for r in records}
    assert all(jaccard(sets[str(i)], sets[f"edit of {i}"]) > 0.7 for i, _ in edits)
    assert set(found) == {(str(i), f"edit of {i}") for i, _ in edits}
