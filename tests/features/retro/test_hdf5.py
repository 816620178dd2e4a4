"""Arrays in HDF5 files against h5py, which reads and writes them in its own ways."""

import numpy as np
import pytest

from megatron.features.retro.hdf5 import array_shapes, read_array, write_arrays, writing

h5py = pytest.importorskip("h5py")

ARRAYS = {
    "chunks": np.arange(35, dtype=np.uint32).reshape(7, 5),
    "n_written": np.array([7], np.uint64),
    "none": np.zeros((0, 4), np.uint32),
    "vectors": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (2, 5), "maxshape": (None, 5)}, {"chunks": (2, 5), "compression": "gzip"}],
    ids=["contiguous", "chunked", "compressed"],
)
def test_what_h5py_writes_is_read(tmp_path, options):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.create_dataset("chunks", data=ARRAYS["chunks"], **options)
    found = read_array(tmp_path / "x.hdf5", "chunks")
    np.testing.assert_array_equal(found, ARRAYS["chunks"])
    assert found.dtype == np.uint32
    assert not found.flags.writeable
    assert isinstance(found.base, np.memmap) == (not options)


def test_h5py_reads_what_is_written(tmp_path):
    path = tmp_path / "x.hdf5"
    write_arrays(path, ARRAYS)
    with h5py.File(path) as file:
        assert set(file) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert file[name].dtype == array.dtype
            np.testing.assert_array_equal(file[name][()], array)
    assert array_shapes(path) == {name: array.shape for name, array in ARRAYS.items()}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read_array(path, name), array)


def test_rows_are_written_in_parts(tmp_path):
    whole, parts = tmp_path / "whole.hdf5", tmp_path / "parts.hdf5"
    write_arrays(whole, ARRAYS)
    layout = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}
    with writing(parts, layout) as files:
        for name in reversed(ARRAYS):
            for row in ARRAYS[name].astype(np.int64 if name == "n_written" else None):
                files[name].append(row[None])
    assert parts.read_bytes() == whole.read_bytes()


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.hdf5"
    write_arrays(path, ARRAYS)
    before = path.read_bytes()
    with pytest.raises(KeyError), writing(path, {"a": (np.dtype("u4"), (3,))}) as files:
        files["b"].append(np.zeros(3))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_not_hdf5(tmp_path):
    path = tmp_path / "x.hdf5"
    with pytest.raises(FileNotFoundError, match=r"x.hdf5 does not exist"):
        read_array(path, "chunks")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"x.hdf5 is damaged or cut short; delete it and run"):
        read_array(path, "chunks")
