"""300 damaged `.idx`, `.bin` and cache files: training refuses each one by name.

A case damages one of the files behind a small dataset whose sample index is cached, opens it as
training does and reads every sample. It must end in a ValueError or an OSError that names the
damaged file (of the cache, the folder to delete): no other exception, and no sample.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.blend import BlendedDataset
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import DESCRIPTION, IndexCache, digest_of
from megatron.data.indexed import IndexedDataset
from megatron.data.pipeline import check_vocabulary

LENGTHS = [7, 0, 30, 1, 12, 5, 0, 44, 3, 9, 2, 17, 8, 21]
PER_DOCUMENT = [1, 2, 1, 3, 0, 1, 4, 2]
N, D, TOKENS = len(LENGTHS), len(PER_DOCUMENT) + 1, sum(LENGTHS)
VOCABULARY, SEED, S, SAMPLES = 40_000, 3, 8, 25
HEADER = 34
OFFSETS, BOUNDS = HEADER + 4 * N, HEADER + 12 * N
IDX_BYTES, BIN_BYTES = HEADER + 12 * N + 8 * D, 2 * TOKENS
Damage = Callable[[Path], None]


def write(prefix: Path, seed: int = SEED, lengths: list[int] = LENGTHS) -> None:
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        tokens = rng.integers(VOCABULARY, size=sum(lengths))
        tokens[::5] = VOCABULARY - 1  # of another dtype these are no ids
        writer.add_documents(tokens, lengths, PER_DOCUMENT)


def read_as_training_does(folder: Path) -> list[list[int]]:
    indexed = IndexedDataset(folder / "x")
    cache = IndexCache(folder / "cache")
    check_vocabulary(indexed, VOCABULARY, cache)
    part = GPTRecipe(S, SEED).build(indexed, range(N), SAMPLES, "train", cache)
    blend = BlendedDataset.build([part, part], [0.4, 0.6], SAMPLES, cache, "train")
    return [blend[i].tolist() for i in range(len(blend))] + [
        part[i].tolist() for i in range(len(part))
    ]


def poke(name: str, at: int, value: bytes) -> Damage:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        assert raw[at : at + len(value)] != value
        raw[at : at + len(value)] = value
        (folder / name).write_bytes(bytes(raw))

    return damage


def add(at: int, change: int, kind: str = "<q") -> Damage:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / "x.idx").read_bytes())
        (value,) = struct.unpack_from(kind, raw, at)
        struct.pack_into(kind, raw, at, value + change)
        (folder / "x.idx").write_bytes(bytes(raw))

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def append(name: str, content: bytes) -> Damage:
    return lambda folder: (
        (folder / name).write_bytes((folder / name).read_bytes() + content) and None
    )


def content(name: str, new: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(new) and None


def a_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def of_another(ending: str, lengths: list[int]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "other").mkdir()
        write(folder / "other" / "x", 9, lengths)
        shutil.copy(folder / "other" / f"x.{ending}", folder / f"x.{ending}")

    return damage


def negative_length(folder: Path) -> None:
    """Sequence 4 loses 15 of its 12 tokens to its neighbour."""
    for damage in (
        add(HEADER + 16, -15, "<i"), add(HEADER + 20, 15, "<i"), add(OFFSETS + 40, -30),
    ):  # fmt: skip
        damage(folder)


def past_the_document(array: np.ndarray) -> np.ndarray:
    """A sample of the right length past the end of its document."""
    row = int(np.argmax(array[1:, 0] == array[:-1, 0]))
    array[row : row + 2, 1] += 1000
    return array


def swap(folder: Path) -> None:
    (folder / "x.idx").rename(folder / "t")
    (folder / "x.bin").rename(folder / "x.idx")
    (folder / "t").rename(folder / "x.bin")


def idx_cases() -> dict[str, Damage]:
    cases: dict[str, Damage] = {}
    edges = [0, 9, 17, 18, 26, HEADER, OFFSETS, BOUNDS, IDX_BYTES]
    for size in sorted({e + d for e in edges for d in (-1, 0, 1)} & set(range(IDX_BYTES))):
        cases[f"idx cut to {size}"] = cut("x.idx", size)
    for more in (1, 3, 8, 12, 4096):
        cases[f"idx and {more} more"] = append("x.idx", bytes(more))
    for at in range(17):
        cases[f"idx byte {at} of magic and version"] = poke("x.idx", at, b"\x7f")
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 9, 80, 255):
        cases[f"idx dtype code {code}"] = poke("x.idx", 17, bytes([code]))
    for name, at, right in (("sequences", 18, N), ("boundaries", 26, D)):
        for count in (0, 1, right - 2, right - 1, right + 1, right + 3, 1 << 31, 1 << 60,
                      (1 << 63) - 1, 1 << 63, (1 << 64) - 1):  # fmt: skip
            cases[f"idx {count} {name}"] = poke("x.idx", at, struct.pack("<Q", count))
    both = struct.pack("<QQ", N - 2, D + 3)  # the same size of the file
    cases["idx counts that fit the size"] = poke("x.idx", 18, both)
    for i in (0, 2, 6, N - 1):
        for length in (-1, -(2**31), 2**31 - 1, 1000):
            cases[f"idx length {length} of sequence {i}"] = poke(
                "x.idx", HEADER + 4 * i, struct.pack("<i", length)
            )
        cases[f"idx length of sequence {i} one more"] = add(HEADER + 4 * i, 1, "<i")
    cases["idx length -3 with offsets that fit"] = negative_length
    for i in (0, 1, 7, N - 1):
        for change in (1, -2, 2, 1 << 33, -(1 << 62), 1 << 62):
            cases[f"idx offset of sequence {i} changed by {change}"] = add(OFFSETS + 8 * i, change)
    for i in (0, 1, 4, D - 1):
        for bound in (-1, -(1 << 63), N + 1, 1 << 40, (1 << 63) - 1):
            cases[f"idx boundary {bound} of document {i}"] = poke(
                "x.idx", BOUNDS + 8 * i, struct.pack("<q", bound)
            )
    cases["idx first boundary 1"] = poke("x.idx", BOUNDS, struct.pack("<q", 1))
    cases["idx last boundary 1 less"] = add(BOUNDS + 8 * (D - 1), -1)
    cases["idx documents out of order"] = poke("x.idx", BOUNDS + 16, struct.pack("<qq", 9, 2))
    cases["idx of zeros"] = content("x.idx", bytes(IDX_BYTES))
    cases["idx of text"] = content("x.idx", b'{"text": "a line of JSON"}\n' * 20)
    cases["idx is a folder"] = a_folder("x.idx")
    cases["idx is missing"] = lambda folder: (folder / "x.idx").unlink()
    cases["idx of another dataset"] = of_another("idx", LENGTHS[1:] + [40])
    cases["idx and bin swapped"] = swap
    return cases


def bin_cases() -> dict[str, Damage]:
    cases: dict[str, Damage] = {}
    for size in (0, 1, 2, 99, BIN_BYTES // 2, BIN_BYTES - 4, BIN_BYTES - 2, BIN_BYTES - 1):
        cases[f"bin cut to {size}"] = cut("x.bin", size)
    for more in (1, 2, 512, 65_536):
        cases[f"bin and {more} more"] = append("x.bin", bytes(more))
    for at in (0, 50, BIN_BYTES - 2):
        cases[f"bin with an id past the vocabulary at {at}"] = poke("x.bin", at, b"\xff\xff")
    cases["bin of another dataset"] = of_another("bin", LENGTHS[1:] + [40])
    cases["bin is a folder"] = a_folder("x.bin")
    cases["bin is missing"] = lambda folder: (folder / "x.bin").unlink()
    return cases


def entry_of(folder: Path, start: str) -> Path:
    (entry,) = (p for p in (folder / "cache").iterdir() if p.is_dir() and p.name.startswith(start))
    return entry


def in_entry(start: str, damage: Damage) -> Damage:
    return lambda folder: damage(entry_of(folder, start))


def arrays(name: str, change: Callable[[np.ndarray], np.ndarray], honest: bool) -> Damage:
    """Another array; `honest` leaves the checksum, else it is made to fit."""

    def damage(entry: Path) -> None:
        array = change(np.load(entry / f"{name}.npy"))
        np.save(entry / f"{name}.npy", array)
        if not honest:
            described = json.loads((entry / DESCRIPTION).read_text())
            described["digests"][name] = digest_of(array)
            (entry / DESCRIPTION).write_text(json.dumps(described))

    return damage


def described(change: Callable[[dict], object]) -> Damage:
    def damage(entry: Path) -> None:
        found = json.loads((entry / DESCRIPTION).read_text())
        found = change(found) or found
        (entry / DESCRIPTION).write_text(json.dumps(found))

    return damage


def set_to(at: tuple[int, ...] | int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[at] = value
        return array

    return change


ENTRIES = {
    "gpt-train": ("document_index", "sample_index", "shuffle_index"),
    "blend-train": ("dataset", "sample"),
    "token-range": ("tokens_and_positions",),
}


def cache_cases() -> dict[str, Damage]:
    cases: dict[str, Damage] = {}
    for start, names in ENTRIES.items():
        own: dict[str, Damage] = {}
        for name in names:
            file = f"{name}.npy"
            for size in (0, 5, 9, 64, 127, 128, 130):
                own[f"{name} cut to {size}"] = cut(file, size)
            own[f"{name} and more"] = append(file, bytes(8))
            own[f"{name} with another version"] = poke(file, 6, b"\x02")
            own[f"{name} with a huge header"] = poke(file, 8, b"\xff\xff")
            own[f"{name} with a header of nonsense"] = poke(file, 10, b"{'descr': '<i4', (((")
            own[f"{name} of text"] = content(file, b"no array")
            own[f"{name} with a flipped bit"] = arrays(
                name, lambda a: a ^ a.dtype.type(1), honest=True
            )
            own[f"{name} of another dtype"] = arrays(name, lambda a: a.astype("f8"), honest=False)
            own[f"{name} of another shape"] = arrays(name, lambda a: a[:-1], honest=False)
            own[f"{name} of another dimension"] = arrays(name, lambda a: a[None], honest=False)
            own[f"{name} missing"] = lambda entry, file=file: (entry / file).unlink()
            own[f"{name} is a folder"] = a_folder(file)
        shape = b"{'descr': '<i4', 'fortran_order': False, 'shape': (999999999999999999999,), }"
        own["a shape of 10**21"] = poke(f"{names[0]}.npy", 10, shape.ljust(117) + b"\n")
        objects = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        own["Python objects"] = poke(f"{names[0]}.npy", 10, objects.ljust(117) + b"\n")
        own["no description"] = lambda entry: (entry / DESCRIPTION).unlink()
        own["an empty description"] = content(DESCRIPTION, b"")
        own["a description of nonsense"] = content(DESCRIPTION, b"\xff\xfe{]")
        own["a deep description"] = content(DESCRIPTION, b"[" * 100_000)
        own["a list as description"] = content(DESCRIPTION, b"[1, 2]")
        own["a description without checksums"] = described(lambda d: d.pop("digests") and None)
        own["a checksum too few"] = described(
            lambda d, first=names[0]: d["digests"].pop(first) and None
        )
        own["a checksum too many"] = described(lambda d: d["digests"].update(more="0"))
        own["checksums of another kind"] = described(
            lambda d, first=names[0]: d["digests"].update({first: 7})
        )
        own["a description of something else"] = described(
            lambda d: d["depends_on"].update(version=77)
        )
        own["an array too many"] = lambda entry: np.save(entry / "more.npy", np.arange(3))
        own["an empty folder"] = lambda entry: [p.unlink() for p in entry.iterdir()] and None
        own["a file in its place"] = lambda entry: (
            shutil.rmtree(entry) or entry.write_bytes(b"x") and None
        )
        cases |= {f"cache {start}: {name}": in_entry(start, d) for name, d in own.items()}
    # Content that cannot be right, under checksums that fit.
    for name, at, value in (
        ("document_index", 3, N), ("document_index", 3, -1), ("document_index", 8, 2**31 - 1),
        ("sample_index", (3, 0), -1), ("sample_index", (3, 0), 2**31 - 1),
        ("sample_index", (3, 1), -4), ("sample_index", (3, 1), 10_000), ("sample_index", (5, 1), 0),
        ("sample_index", (0, 0), 60), ("shuffle_index", 2, 2**32 - 1), ("shuffle_index", 2, 200),
    ):  # fmt: skip
        cases[f"cache {name}[{at}] = {value}"] = in_entry(
            "gpt-train", arrays(name, set_to(at, value), honest=False)
        )
    cases["cache sample past the end of its document"] = in_entry(
        "gpt-train", arrays("sample_index", past_the_document, honest=False)
    )
    for name, value in (("dataset", 2), ("dataset", -1), ("sample", 2**32 - 1), ("sample", 999)):
        cases[f"cache {name}[4] = {value}"] = in_entry(
            "blend-train", arrays(name, set_to(4, value), honest=False)
        )
    return cases


ALL = idx_cases() | bin_cases() | cache_cases()
SAMPLE = 5  # each fifth in `make test`


def named(case: str, folder: Path) -> list[str]:
    """What a message about the case has to hold, one of them."""
    if case.startswith("cache"):
        return [str(folder / "cache")]
    # Sizes that do not fit, and ids read with another dtype, show at either file.
    return [str(folder / "x.idx"), str(folder / "x.bin")]


def test_there_are_300() -> None:
    assert len(ALL) >= 300
    assert len(list(ALL)[::SAMPLE]) >= 60


def test_the_sound_files_are_read(tmp_path: Path) -> None:
    write(tmp_path / "x")
    first = read_as_training_does(tmp_path)
    assert len(first) == 25 + (2 * TOKENS - 1) // S
    assert read_as_training_does(tmp_path) == first


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if number % SAMPLE == 0 else [pytest.mark.proof])
        for number, case in enumerate(ALL)
    ],
)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    write(tmp_path / "x")
    read_as_training_does(tmp_path)
    if case.startswith("bin with"):  # the .bin's date may not change within a clock tick
        shutil.rmtree(tmp_path / "cache")
    ALL[case](tmp_path)
    with pytest.raises((ValueError, OSError)) as error:
        read_as_training_does(tmp_path)
    message = str(error.value)
    assert any(name in message for name in named(case, tmp_path)), message
    assert error.type in (ValueError, FileNotFoundError, OSError), error.type


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["x.idx", "x.bin", "cache"])
def test_files_of_another_user(name: str, tmp_path: Path) -> None:
    write(tmp_path / "x")
    read_as_training_does(tmp_path)
    path = tmp_path / name if name != "cache" else entry_of(tmp_path, "gpt-train") / DESCRIPTION
    path.chmod(0)
    with pytest.raises((ValueError, PermissionError), match=str(path.parent)):
        read_as_training_does(tmp_path)
