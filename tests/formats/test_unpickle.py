"""Files of torch.save that ask for code: none of it runs, and the file is named.

What an attacker has is the whole file. So the tests write files from bytes and opcodes, in both of
torch.save's forms and all of pickle's protocols, and look for what the code would have left behind.
"""

import argparse
import collections
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from pickle_files import FORMS, as_file

from megatron.checkpoint.files import CheckpointError
from megatron.formats import unpickle
from megatron.formats.unpickle import Inert, load_pickle

PROTOCOLS = range(6)


class Call:
    """Pickles as a call of whatever it is given, by name."""

    def __init__(self, module, name, *args):
        self.module, self.name, self.args = module, name, args

    def dumps(self, protocol):
        """GLOBAL, the arguments, REDUCE; by STACK_GLOBAL from protocol 4 on."""
        if protocol < 4:
            actual = b"c" + f"{self.module}\n{self.name}\n".encode()
        else:
            actual = b"".join(
                b"\x8c" + bytes([len(text)]) + text.encode() for text in (self.module, self.name)
            )
            actual += b"\x93"
        args = pickle.dumps(self.args, min(protocol, 2))
        args = args[2:] if args[:1] == b"\x80" else args
        start = b"\x80" + bytes([protocol]) if protocol >= 2 else b"\x80\x02"
        return start + actual + args[:-1] + b"R."


def marker(tmp_path):
    return tmp_path / "code-has-run"


def calls(tmp_path):
    touch = f"touch {marker(tmp_path)}"
    python = f"open({str(marker(tmp_path))!r}, 'w')"
    jit = str(tmp_path / "module.pt")
    return {
        "os.system": Call("os", "system", touch),
        "posix.system": Call("posix", "system", touch),
        "nt.system": Call("nt", "system", touch),
        "subprocess": Call("subprocess", "getoutput", touch),
        "eval": Call("builtins", "eval", python),
        "exec": Call("builtins", "exec", python),
        "eval of Python 2": Call("__builtin__", "eval", python),
        "compile": Call("builtins", "compile", python, "x", "exec"),
        "getattr": Call("builtins", "getattr", "x", "__class__"),
        "setattr": Call("builtins", "setattr", "x", "y", 1),
        "open": Call("builtins", "open", str(marker(tmp_path)), "w"),
        "import": Call("builtins", "__import__", "os"),
        "import_module": Call("importlib", "import_module", "os"),
        "runpy": Call("runpy", "run_path", jit),
        "partial": Call("functools", "partial", print),
        "attrgetter": Call("operator", "attrgetter", "system"),
        "methodcaller": Call("operator", "methodcaller", "system", touch),
        "copyreg": Call("copyreg", "_reconstructor", object, object, None),
        "load from bytes": Call("torch.storage", "_load_from_bytes", b"x"),
        "load": Call("torch", "load", jit),
        "torch.serialization": Call("torch.serialization", "load", jit),
        "hub": Call("torch.hub", "load", "a", "b"),
        "jit": Call("torch.jit", "load", jit),
        "jit script": Call("torch.jit._script", "unpackage_script_module", jit),
        "wrap storage": Call("torch.serialization", "_maybe_decode_ascii", b"x"),
        "import by torch": Call("torch._utils", "_import_dotted_name", "os.system"),
        "rebuild wrapper": Call("torch._utils", "_rebuild_wrapper_subclass", 1),
        "package": Call("torch.package", "PackageImporter", jit),
        "numpy.load": Call("numpy", "load", jit, None, True),
        "numpy.savetxt": Call("numpy", "savetxt", str(marker(tmp_path)), [1]),
        "numpy memmap": Call("numpy", "memmap", str(marker(tmp_path)), "u1", "w+", 0, 1),
        "numpy tests": Call("numpy.testing._private.utils", "runstring", python, {}),
        "Storage in the name": Call("os", "systemStorage", touch),
        "Storage of another module": Call("subprocess", "FloatStorage", touch),
        "dots": Call("megatron", "config.os.system", touch),
        "dots in a known one": Call("argparse", "Namespace.__init__", touch),
        "argparse": Call("argparse", "FileType", "w"),
        "pip": Call("pip", "main", ["--version"]),
        "dunder": Call("builtins", "object.__reduce__", 1),
        "lib2to3": Call("lib2to3.pgen2.grammar", "Grammar.loads", b"x"),
        "logging": Call("logging", "FileHandler", str(marker(tmp_path))),
        "shelve": Call("shelve", "open", str(marker(tmp_path))),
        "this project": Call("megatronic", "x"),
    }


NAMES = tuple(calls(Path("x")))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_calls_are_refused(name, form, tmp_path):
    call = calls(tmp_path)[name]
    for protocol in PROTOCOLS:
        path = as_file(call.dumps(protocol), tmp_path / f"evil-{protocol}.pt", form)
        with pytest.raises(CheckpointError, match=f"evil-{protocol}.pt cannot be opened"):
            load_pickle(path)
    assert not marker(tmp_path).exists()


@pytest.mark.parametrize("form", FORMS)
def test_the_attacks_work_without_the_restriction(form, tmp_path):
    """Else the test above shows nothing."""
    path = as_file(calls(tmp_path)["os.system"].dumps(2), tmp_path / "evil.pt", form)
    torch.load(path, weights_only=False)
    assert marker(tmp_path).exists()


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_hidden_deep_in_a_checkpoint(form, protocol, tmp_path):
    command = f"touch {marker(tmp_path)}"
    content = {
        "model": {"weight": torch.zeros(3)},
        "args": argparse.Namespace(a=[{"b": (1, Evil(command))}]),
    }
    path = tmp_path / "evil.pt"
    torch.save(
        content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "zip"
    )
    with pytest.raises(CheckpointError, match=r"evil.pt cannot be opened: .*posix.system"):
        load_pickle(path)
    assert not marker(tmp_path).exists()


BUILDS = {
    "function": b"ctorch._utils\n_rebuild_tensor_v2\n",
    "class": b"cargparse\nNamespace\n",
    "inert class": b"cmegatron.config.model\nModelConfig\n",
    "parameter": b"ctorch.nn.parameter\nParameter\n",
    "tensor": b"ctorch\nTensor\n",
    "size": b"ctorch\nSize\n",
    "dict": b"ccollections\nOrderedDict\n",
    "dtype": b"ctorch\nfloat32\n",
    "numpy": b"cnumpy\nndarray\n",
    "encode": b"c_codecs\nencode\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("slots", [False, True])
def test_nothing_that_is_named_can_be_changed(name, slots, form, tmp_path):
    """BUILD sets attributes of functions and classes too, for the whole process."""
    state = pickle.dumps((None, {"changed": 1}) if slots else {"changed": 1}, 2)[2:-1]
    path = as_file(b"\x80\x02" + BUILDS[name] + state + b"b.", tmp_path / "evil.pt", form)
    with pytest.raises(CheckpointError, match=r"evil.pt cannot be opened"):
        load_pickle(path)
    for known in unpickle._KNOWN.values():
        assert not hasattr(known, "changed"), known


def test_all_that_is_known_is_immutable():
    for (module, name), known in unpickle._KNOWN.items():
        with pytest.raises((TypeError, AttributeError)):
            known.changed = 1
        with pytest.raises((TypeError, AttributeError)):
            known.__dict__["changed"] = 1
        assert not hasattr(known, "changed"), (module, name)


def test_no_patch_is_written_for_a_container(tmp_path, monkeypatch):
    """In its older form torch compares sources of containers, and writes the difference to a file
    whose name is the container's when that has ``dump_patches``: both could be set."""
    monkeypatch.chdir(tmp_path)
    states = (
        b"}(X\x0c\x00\x00\x00dump_patches\x88X\x08\x00\x00\x00__name__X\x05\x00\x00\x00ownedub",
        b"N}(X\x0c\x00\x00\x00dump_patches\x88X\x08\x00\x00\x00__name__X\x05\x00\x00\x00ownedu\x86b",
    )
    for named in BUILDS.values():
        for state in (*states, b""):
            saved_id = b"(X\x06\x00\x00\x00module" + named + state
            saved_id += b"X\x01\x00\x00\x00fX\x04\x00\x00\x00codet"
            path = as_file(b"\x80\x02" + saved_id + b"Q.", tmp_path / "evil.pt", "old")
            try:
                load_pickle(path)
            except CheckpointError as error:
                assert "evil.pt" in str(error)
            assert [each.name for each in tmp_path.iterdir()] == ["evil.pt"]


PERSISTENT = {
    "no tuple": b"X\x01\x00\x00\x00xQ.",
    "another kind": b"(X\x05\x00\x00\x00otherX\x01\x00\x00\x00xtQ.",
    "no storage": b"(X\x07\x00\x00\x00storagecargparse\nNamespace\nX\x01\x00\x00\x000"
                  b"X\x03\x00\x00\x00cpuK\x01tQ.",
    "a path": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x0b\x00\x00\x00../../../xx"
              b"X\x03\x00\x00\x00cpuK\x01tQ.",
    "a negative size": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
                       b"X\x03\x00\x00\x00cpuJ\xff\xff\xff\xfftQ.",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_ids(name, form, tmp_path):
    path = as_file(b"\x80\x02" + PERSISTENT[name], tmp_path / "evil.pt", form)
    with pytest.raises(CheckpointError, match=r"evil.pt cannot be opened"):
        load_pickle(path)


@pytest.mark.parametrize("size, stride, offset", [
    ((1000,), (1,), 0), ((2,), (1,), 3), ((2,), (1,), -1), ((2, 2), (10**9, 1), 0),
    ((-1,), (1,), 0),
])  # fmt: skip
def test_a_tensor_cannot_reach_beyond_its_storage(size, stride, offset, tmp_path):
    class Beyond:
        def __reduce__(self):
            args = (torch.zeros(4)._typed_storage(), offset, size, stride, False, {})
            return torch._utils._rebuild_tensor_v2, args

    path = tmp_path / "evil.pt"
    torch.save({"x": Beyond()}, path)
    with pytest.raises(CheckpointError, match=r"evil.pt cannot be opened"):
        load_pickle(path)


def test_torchscript_and_other_zips(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1

    script = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(Module(), torch.zeros(1)), script)
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b.txt", "text")
    empty = tmp_path / "empty.pt"
    with zipfile.ZipFile(empty, "w"):
        pass
    for path in (script, other, empty):
        with pytest.raises(CheckpointError, match=path.name):
            load_pickle(path)


@pytest.mark.parametrize("first", [b"storages", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.x"])
def test_tar_files(first, tmp_path):
    """Torch's oldest form, which it would unpack to the disk; the name of a tar file's first member
    is how the file begins, so that it can begin like a pickle."""
    path = tmp_path / "evil.pt"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="latin1") as archive:
        for name in (first.decode("latin1"), "storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert path.read_bytes().startswith(first)
    with pytest.raises(CheckpointError, match="evil.pt is not a file that torch.save wrote"):
        load_pickle(path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80", b"PK", b"PK\x03\x04", b"\x80\x02.", b"\x80\x04\x95", b"cos\nsystem\n",
        b"\x1f\x8b" + b"0" * 30, pickle.dumps({"a": 1}), pickle.dumps(Call("a", "b")),
    ],
)  # fmt: skip
def test_other_files(content, tmp_path):
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"other.pt"):
        load_pickle(path)
    with pytest.raises(CheckpointError, match=r"absent.pt is missing"):
        load_pickle(tmp_path / "absent.pt")


@pytest.mark.parametrize("form", FORMS)
def test_truncated_files(form, tmp_path):
    whole = tmp_path / "whole.pt"
    content = {"a": torch.arange(100.0), "args": argparse.Namespace(x=1)}
    torch.save(content, whole, _use_new_zipfile_serialization=form == "zip")
    stored, cut = whole.read_bytes(), tmp_path / "cut.pt"
    for size in range(0, len(stored), 7):
        cut.write_bytes(stored[:size])
        with pytest.raises(CheckpointError, match=r"cut.pt"):
            load_pickle(cut)


def test_numpy_arrays_of_objects_are_not_built(tmp_path):
    """Only numbers become values; an array stays closed."""

    class Settings:
        def __reduce__(self):
            return dict, ({"random": numpy.arange(3), "object": numpy.array([1, "x"], object)},)

    path = tmp_path / "numpy.pt"
    torch.save({"n": numpy.float64(0.5), "i": numpy.int64(-3), "s": Settings()}, path)
    actual = load_pickle(path)
    assert actual["n"] == 0.5 and actual["i"] == -3
    assert type(actual["n"]) is float and type(actual["i"]) is int
    assert isinstance(actual["s"]["random"], Inert) and isinstance(actual["s"]["object"], Inert)


@pytest.mark.parametrize("code", ["O", "O8", "V8", "S8", "M8", "f8,f8", "(2,)f8"])
def test_numpy_scalars_of_other_formats_are_refused(code, tmp_path):
    dtype = b"cnumpy\ndtype\nX" + struct.pack("<I", len(code)) + code.encode() + b"\x85R"
    scalar = b"cnumpy.core.multiarray\nscalar\n" + dtype + b"C\x08abcdefgh\x86R."
    path = as_file(b"\x80\x03" + scalar, tmp_path / "evil.pt", "zip")
    with pytest.raises(CheckpointError, match=r"evil.pt cannot be opened: it has a NumPy value"):
        load_pickle(path)


@pytest.mark.parametrize("form", FORMS)
def test_what_checkpoints_hold_is_read(form, tmp_path):
    attributed = torch.arange(4.0)
    attributed.tensor_model_parallel = True
    content = {
        "args": argparse.Namespace(lr=0.1, names=["a"], dtype=torch.bfloat16, device="cuda"),
        "model": collections.OrderedDict(w=torch.randn(3, 2), h=torch.ones(2).half()),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "attributed": attributed,
        "shared": (attributed[:2], attributed[2:]),
        "transposed": torch.arange(6).view(2, 3).T,
        "empty": torch.zeros(0, 3),
        "size": torch.Size([1, 2]),
        "set": {1, 2},
        "random": numpy.random.RandomState(1).get_state(),
    }
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    actual = load_pickle(path)
    assert vars(actual["args"]) == vars(content["args"])
    assert isinstance(actual["args"], argparse.Namespace)
    for name in ("parameter", "attributed", "transposed", "empty"):
        assert torch.equal(actual[name], content[name].detach()), name
        assert actual[name].dtype == content[name].dtype and not actual[name].requires_grad
    for name, values in content["model"].items():
        assert torch.equal(actual["model"][name], values)
    assert torch.equal(actual["shared"][1], attributed[2:])
    assert actual["size"] == content["size"] and actual["set"] == {1, 2}
    assert actual["random"][0] == "MT19937"


def test_classes_of_trainers_stay_closed(tmp_path, monkeypatch):
    """Their values are kept, and none of their code is imported or run."""
    payload = b"\x80\x02cdeepspeed.nowhere\nScaler\n)\x81}X\x05\x00\x00\x00scaleK\x08sb."
    actual = load_pickle(as_file(payload, tmp_path / "inert.pt", "zip"))
    assert isinstance(actual, Inert) and actual.scale == 8
    assert type(actual).__name__ == "Scaler"
    again = payload[:-1] + b"}X\x0c\x00\x00\x00__setstate__cmegatron.x\nY\nsb}b."
    assert isinstance(load_pickle(as_file(again, tmp_path / "inert.pt", "zip")), Inert)


def test_members_of_enumerations_as_python_3_11_2_pickles_them(tmp_path):
    """It names them by getattr; of anything but a stand-in that is refused."""
    import argparse

    path = tmp_path / "state.pt"

    class Member:
        def __init__(self, owner):
            self.owner = owner

        def __reduce__(self):
            return getattr, (self.owner, "optimizer_states")

    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"stage": Member(ZeroStageEnum), "w": torch.ones(2)}, path)
    actual = load_pickle(path)
    assert actual["stage"].args == ("optimizer_states",) and actual["w"].sum() == 2
    for owner in (argparse.Namespace, dict, "text"):
        torch.save({"stage": Member(owner)}, path)
        with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
            load_pickle(path)
