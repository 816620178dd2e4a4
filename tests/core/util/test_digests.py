"""Digests have the values that caches and checkpoints on disks have."""

import subprocess

import numpy as np

from megatron.util.digests import digest, digest_of_parts, hash64, sha256, sha256_of_file


def test_values():
    # As `b2sum -l 128` and `b2sum -l 64` print them.
    assert digest("abc") == digest(b"abc") == "cf4ab791c62b8d2b2109c90275287816"
    assert hash64(b"abc") == int.from_bytes(bytes.fromhex("d8bb14d833d59559"), "little")
    # FIPS 180-2, appendix B.1.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256("abc") == sha256(b"abc") == expected


def test_an_array_is_its_bytes():
    array = np.arange(6, dtype="<i4").reshape(2, 3)
    assert digest(array.data) == digest(array.tobytes())
    assert digest(array[:0].data) == digest(b"")


def test_parts_are_one_text():
    assert digest_of_parts(["ab", b"", np.frombuffer(b"c", np.uint8).data]) == digest("abc")


def test_a_key_makes_another_hash():
    assert hash64(b"abc", b"1") != hash64(b"abc") != hash64(b"abc", b"2")


def test_files_against_sha256sum(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 40_000)  # more than two blocks
    printed = subprocess.run(
        ["sha256sum", str(tmp_path / "file")], capture_output=True, text=True, check=True
    ).stdout
    assert sha256_of_file(tmp_path / "file") == printed.split()[0]
