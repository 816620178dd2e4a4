"""HDF5 files of others: arrays of numbers in the file itself are read, and nothing else: the format
can take content from any file, and claim any size."""

import h5py
import numpy as np
import pytest

from megatron.features.retro.hdf5 import array_shapes, read_array


def virtual(file, other):
    layout = h5py.VirtualLayout((5,), "i8")
    layout[:] = h5py.VirtualSource(str(other), "chunks", (5,))
    file.create_virtual_dataset("chunks", layout)


def compressed_zeros(file, other):
    made = file.create_dataset(
        "chunks", (1 << 31,), "u1", chunks=(1 << 22,), compression="gzip", compression_opts=9
    )
    made[: 1 << 22] = 0


HOSTILE = {
    "external link": lambda f, other: f.__setitem__(
        "chunks", h5py.ExternalLink(str(other), "chunks")
    ),
    "link to itself": lambda f, other: f.__setitem__("chunks", h5py.SoftLink("/chunks")),
    "virtual": virtual,
    "stored elsewhere": lambda f, other: f.create_dataset(
        "chunks", (10,), "i8", external=[(str(other), 0, 80)]
    ),
    "no content": lambda f, other: f.create_dataset("chunks", (1 << 40, 4), "i8"),
    "no chunks": lambda f, other: f.create_dataset("chunks", (1 << 40,), "i8", chunks=(1 << 20,)),
    "compressed zeros": compressed_zeros,
    "group": lambda f, other: f.create_group("chunks"),
    "type": lambda f, other: f.__setitem__("chunks", np.dtype("i8")),
    "texts": lambda f, other: f.create_dataset("chunks", data=["a", "b"]),
    "rows of any length": lambda f, other: f.create_dataset("chunks", (3,), h5py.vlen_dtype("i8")),
    "references": lambda f, other: f.create_dataset("chunks", (3,), h5py.ref_dtype),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_refused(name, tmp_path):
    path, other = tmp_path / "part.hdf5", tmp_path / "secret.hdf5"
    with h5py.File(other, "w") as file:
        file["chunks"] = np.arange(5)
    with h5py.File(path, "w") as file:
        HOSTILE[name](file, other)
    with pytest.raises(ValueError, match=r"^\S*part.hdf5: chunks (is no array|has .* bytes)") as at:
        read_array(path, "chunks")
    assert "\n" not in str(at.value)


@pytest.mark.parametrize("options", [{}, {"chunks": (7,)}, {"compression": "gzip"}])
def test_what_upstream_may_have_written(options, tmp_path):
    values = np.random.default_rng(1).integers(2**60, size=100)
    with h5py.File(tmp_path / "part.hdf5", "w") as file:
        file.create_dataset("chunks", data=values, **options)
    assert np.array_equal(read_array(tmp_path / "part.hdf5", "chunks"), values)
    assert array_shapes(tmp_path / "part.hdf5") == {"chunks": (100,)}
