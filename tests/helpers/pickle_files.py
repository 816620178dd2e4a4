"""Files of torch.save that contain a given pickle, as an attacker makes them."""

import io
import pickle
import zipfile
from pathlib import Path

import torch

FORMS = ("zip", "old")


def as_file(payload: bytes, path: Path, form: str) -> Path:
    """A file of torch.save whose object is this pickle."""
    buffer = io.BytesIO()
    torch.save({}, buffer, _use_new_zipfile_serialization=form == "zip")
    if form == "zip":
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(name, payload if name.endswith("data.pkl") else old.read(name))
    else:
        parts, start = [], 0
        buffer.seek(0)
        for _ in range(5):  # magic number, protocol, system, object, keys of storages
            pickle.load(buffer)
            parts.append(buffer.getvalue()[start : buffer.tell()])
            start = buffer.tell()
        parts[3] = payload
        path.write_bytes(b"".join(parts))
    return path
