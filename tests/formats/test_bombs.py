"""Small files that ask for much memory or time: each is refused by name, soon, in little memory."""

import io
import resource
import struct
import time
import zipfile
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from pickle_files import FORMS, as_file
from samples import sampled

from megatron.checkpoint.files import CheckpointError
from megatron.formats.legacy_megatron.rank_files import RankFile, find_megatron
from megatron.formats.unpickle import load_pickle

MOST_BYTES = 300 << 20
MOST_SECONDS = 10


@contextmanager
def bounded():
    """Fails if the block takes much time, or memory that the process did not have before."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert time.process_time() - start < MOST_SECONDS and grown << 10 < MOST_BYTES


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def called(module, name, argument):
    return b"c" + f"{module}\n{name}\n".encode() + argument + b"\x85R"


def long(number):
    return b"\x8a\x09" + number.to_bytes(9, "little", signed=True)


DOUBLED = b"K\x01\x85" + b"2\x86" * 60
"""A tuple of the tuple before it twice, 60 times: 2^60 values in 120 bytes."""


def doubled_lists(levels=60):
    content = b"]K\x01a"
    for number in range(levels):
        content += b"q%c0](h%ch%ce" % (number, number, number)
    return content


def doubled_dicts(levels=60):
    content = b"}" + text("a") + b"Ns"
    for number in range(levels):
        content += b"q%c0}(" % number + b"".join(text(k) + b"h%c" % number for k in "ab") + b"u"
    return content


BOMBS = {
    "bytearray": called("builtins", "bytearray", long(64 << 30)),
    "list of a range": called("builtins", "list", called("builtins", "range", long(10**11))),
    "set of a range": called("__builtin__", "set", called("__builtin__", "range", long(10**11))),
    "tuple of a range": called("builtins", "tuple", called("builtins", "range", long(10**11))),
    "copies of a list": b"](" + b"K\x01" * 10**5 + b"eq\x01"
    + called("builtins", "list", b"h\x01") * 10**4,
    "lists of a text": text("a" * 10**6) + b"q\x01" + called("builtins", "list", b"h\x01") * 1000,
    "encoded texts": text("a" * 10**6) + b"q\x01"
    + b"c_codecs\nencode\nh\x01" * 1 + text("latin1") + b"\x86R"
    + (b"c_codecs\nencode\nh\x01" + text("latin1") + b"\x86R") * 3000,
    "states of objects": b"}(" + b"".join(text(f"k{i}") + b"N" for i in range(10**4)) + b"uq\x01"
    + b"cdeepspeed.x\nY\n)\x81h\x01b" * 5000,
    "settings": b"}(" + b"".join(text(f"k{i}") + b"N" for i in range(10**4)) + b"uq\x01"
    + b"cargparse\nNamespace\n)\x81h\x01b" * 5000,
    "a key to hash": b"}" + DOUBLED + b"Ns",
    "keys to hash": b"}(" + DOUBLED + b"Nu",
    "a dict of a key": b"(" + DOUBLED + b"Nd",
    "a set to hash": b"\x8f(" + DOUBLED + b"\x90",
    "a frozen set": b"(" + DOUBLED + b"\x91",
    "a set of a list": called("builtins", "set", b"]" + DOUBLED + b"a"),
    "pairs": called("collections", "OrderedDict", b"]" + DOUBLED + b"N\x86a"),
    "tuples": DOUBLED,
    "lists": doubled_lists(),
    "dicts": doubled_dicts(),
    "a list of itself": b"]q\x01h\x01a",
    "text of lists": called("builtins", "str", doubled_lists()),
    "a name of lists": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + DOUBLED + text("cpu")
    + b"K\x01tQ",
    "an array's dtype": b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n" + doubled_lists()
    + b"\x85RC\x08abcdefgh\x86R",
    "digits": b"L" + b"9" * 10**6 + b"L\n",
    "deep lists": b"]" * 10**6 + b"a" * (10**6 - 1),
}  # fmt: skip


FEW = ("bytearray", "list of a range", "copies of a list", "a key to hash", "tuples", "dicts")


@pytest.mark.parametrize(
    ("name", "form"),
    sampled(product(BOMBS, FORMS), lambda case: case[0] in FEW and case[1] == "zip"),
)
def test_pickles(name, form, tmp_path):
    path = as_file(b"\x80\x04" + BOMBS[name] + b".", tmp_path / "bomb.pt", form)
    with bounded(), pytest.raises(CheckpointError, match=r"bomb.pt cannot be opened: \S") as caught:
        load_pickle(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_numbers_of_objects_cost_nothing(tmp_path):
    """PUT with a large number: Python's unpickler in C would make a table of 64 GiB for it."""
    path = as_file(b"\x80\x02Nr\xff\xff\xff\xff.", tmp_path / "memo.pt", "zip")
    with bounded():
        assert load_pickle(path) is None


@pytest.mark.parametrize("member", ["data.pkl", "data/0", "byteorder"])
def test_compressed_members(member, tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"x": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as old:
        stored = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in stored.items():
            if name.endswith(member):
                new.writestr(name, content + bytes(64 << 20), zipfile.ZIP_DEFLATED)
            else:
                new.writestr(name, content)
    with bounded(), pytest.raises(CheckpointError, match=r"bomb.pt is a zip file with compressed"):
        load_pickle(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_one_value_repeated(form, tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, path,
               _use_new_zipfile_serialization=form == "zip")  # fmt: skip
    with bounded(), pytest.raises(CheckpointError, match=r"bomb.pt .*1,099,511,627,776 values"):
        load_pickle(path)


MEMBER = "release/mp_rank_00/model_optim_rng.pt"


def archive(path, compression, content=b"", zeros=0):
    with (
        zipfile.ZipFile(path, "w", compression) as packed,
        packed.open(MEMBER, "w", force_zip64=True) as member,
    ):
        member.write(content)
        for _ in range(zeros >> 20):
            member.write(bytes(1 << 20))


@pytest.mark.parametrize(
    "compression",
    sampled(
        (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA),
        lambda kind: kind == zipfile.ZIP_DEFLATED,
    ),
)
def test_archives(compression, tmp_path):
    """An archive of a checkpoint whose member is 1,000 times larger than the archive."""
    path = tmp_path / "megatron.zip"
    archive(path, compression, b"PK", zeros=80 << 20)
    assert path.stat().st_size < 1 << 20
    folder = find_megatron(path, None)
    assert folder == path / "release"
    with bounded(), pytest.raises(CheckpointError, match=r"model_optim_rng.pt has .* compressed"):
        RankFile.open(path / MEMBER)


def test_an_archive_whose_directory_lies(tmp_path):
    """It says that a member is small, and its data continue."""
    path = tmp_path / "megatron.zip"
    archive(path, zipfile.ZIP_DEFLATED, b"PK", zeros=80 << 20)
    content = path.read_bytes()
    size = (80 << 20) + 2
    path.write_bytes(content.replace(struct.pack("<I", size), struct.pack("<I", 1000)))
    with bounded(), pytest.raises(CheckpointError, match="model_optim_rng.pt"):
        RankFile.open(path / MEMBER)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_ordinary_archive_is_read_without_a_copy_in_memory(compression, tmp_path):
    """Its temporary file stays mapped after it was deleted."""
    weights = {"w": torch.randint(2**31, (4 << 20,), dtype=torch.int32)}
    buffer = io.BytesIO()
    torch.save({"model": weights, "iteration": 3}, buffer)
    path = tmp_path / "megatron.zip"
    archive(path, compression, buffer.getvalue())
    del buffer
    opened = RankFile.open(path / MEMBER)
    assert opened.iteration == 3
    assert torch.equal(opened.chunks[0]["w"], weights["w"])


def test_a_tracker_in_an_archive_is_not_read_whole(tmp_path):
    path = tmp_path / "megatron.zip"
    archive(path, zipfile.ZIP_DEFLATED, b"x")
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
        packed.open("latest_checkpointed_iteration.txt", "w") as member,
    ):
        for _ in range(400):
            member.write(b"7" * (1 << 20))
    with bounded(), pytest.raises(CheckpointError, match="there is no checkpoint 777") as caught:
        find_megatron(path, None)
    assert len(str(caught.value)) < 3000
