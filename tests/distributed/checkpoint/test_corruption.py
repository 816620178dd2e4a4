"""Damaged checkpoints are refused by the file's name, whatever the damage, before anything of them
is loaded; and no file of a checkpoint is ever run."""

import contextlib
import dataclasses
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_jobs import TINY, train

from megatron.apps.parity.runs import watched_trainer
from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import file_facts, manifest, write_manifest
from megatron.config import CheckpointConfig, TokenizerConfig
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.run.run import parse_run
from megatron.tokenizer import build_tokenizer
from megatron.training import resume

FLAGS = [*TINY, "--train-iters", "4", "--zero-stage", "1"]
NAMED, OLDER = "global_step4", "global_step2"
"""The checkpoint that the tracker names, which is damaged, and another one, which is whole and must
not be taken in its stead."""
SAMPLE, ALL = 15, 200


@pytest.fixture(scope="module")
def intact(pool, tmp_path_factory):
    save = tmp_path_factory.mktemp("intact")
    shape = ["--tensor-model-parallel-size", "2"]
    pool.run(4, train, [*FLAGS, *shape, "--save", str(save), "--save-interval", "2"])
    assert (save / NAMED).is_dir() and (save / OLDER).is_dir()
    return save


# Damage by accident: the manifest is as it was written.


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncate(folder, chance):
    path = chance.choice(files_of(folder))
    size = path.stat().st_size
    os.truncate(path, chance.choice([0, size - 1, chance.randrange(size)]))
    return path


def extend(folder, chance):
    path = chance.choice(files_of(folder))
    with open(path, "ab") as file:
        file.write(chance.choice([b"\0", b"\n", b" ", chance.randbytes(100)]))
    return path


def flip(folder, chance):
    path = chance.choice(files_of(folder))
    content = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))
    return path


def drop(folder, chance):
    path = chance.choice(files_of(folder))
    path.unlink()
    return path


def drop_shard(folder, chance):
    path = chance.choice(sorted(folder.glob("*.safetensors")))
    path.unlink()
    return path


def swap(folder, chance):
    while True:
        one, two = chance.sample(files_of(folder), 2)
        if one.read_bytes() != two.read_bytes():
            break
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return one, two


def older(folder, chance):
    """A file of the other checkpoint: right in every respect but its content."""
    path = chance.choice(["state.json", "weights-00000.safetensors", "optimizer-00002.safetensors"])
    shutil.copy(folder.parent / OLDER / path, folder / path)
    return folder / path


def wrong_json(folder, chance):
    path = chance.choice(sorted(folder.glob("*.json")))
    path.write_text(chance.choice(["", "{", "[]", "null", "{}", '{"a": NaN}', "\x00"]))
    return path


def tracker(folder, chance):
    path = folder.parent / "latest"
    other = [
        b"",
        b"\n",
        b"global_step5\n",
        b"global_step\n",
        b"\xff",
        b"../" + NAMED.encode(),
        b".",
    ]
    path.write_bytes(chance.choice(other))
    return path


def tracker_flip(folder, chance):
    path = folder.parent / "latest"
    flip_one = bytearray(path.read_bytes())
    while True:
        place = chance.randrange(8 * len(flip_one))
        flip_one[place // 8] ^= 1 << place % 8
        named = bytes(flip_one).decode(errors="replace").strip(" \t\r\n")
        if named not in (NAMED, OLDER):
            break
        flip_one[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(flip_one))
    return path


ACCIDENTS = [
    truncate, extend, flip, drop, drop_shard, swap, older, wrong_json, tracker, tracker_flip,
]  # fmt: skip

# Damage with a manifest that fits, as a wrong tool or a person would do it.


def sign(folder, files=None):
    """Writes the manifest again for the files as they are."""
    names = list(manifest(folder)) if files is None else files
    (folder / "manifest.json").unlink()
    write_manifest(folder, {name: file_facts(folder / name) for name in names})


def signed_json(folder, chance):
    path = folder / chance.choice(["config.json", "state.json", "index.json"])
    path.write_text(chance.choice(["", "{", "[]", "null", "3", '"text"', "\x00"]))
    sign(folder)
    return path


def signed_state(folder, chance):
    path = folder / "state.json"
    state = read_json(path)
    key = chance.choice(["iteration", "consumed_samples", "optimizer_step"])
    if chance.random() < 0.5:
        del state[key]
    else:
        state[key] = chance.choice([-1, "4", None, 1.5, [4]])
    path.write_text(json.dumps(state))
    sign(folder)
    return path


def signed_config(folder, chance):
    path = folder / "config.json"
    config = read_json(path)
    key = chance.choice(["model", "tokenizer", "checkpoint"])
    config[key] = chance.choice([None, 3, [], {"no_such_value": 1}])
    path.write_text(json.dumps(config))
    sign(folder)
    return path, folder  # without a model it is one of another architecture


def signed_index(folder, chance):
    path = folder / "index.json"
    index = read_json(path)
    name = chance.choice(sorted(index))
    entries = index[name]
    entry = chance.choice(entries)
    change = chance.randrange(9)
    if change == 0:
        entries.remove(entry)
    elif change == 1:
        entries.append(entry)
    elif change == 2:
        entry["end"] -= 1
    elif change == 3:
        entry["start"] += 1
        entry["end"] += 1
    elif change == 4:
        entry["shape"][0] += 1
    elif change == 5:
        entry["files"]["weight"] = "../" + entry["files"]["weight"]
    elif change == 6:
        del entry[chance.choice(["shape", "start", "files", "ranges"])]
    elif change == 7:
        del index[name]
    else:
        entry["files"]["weight"] = chance.choice(["state.json", "random-00000.safetensors"])
    path.write_text(json.dumps(index))
    sign(folder)
    # What the index asks of a file is told of that file; a parameter that it lacks, of the folder.
    return path, Path(entry["files"]["weight"]) if change == 8 else folder if change == 7 else path


def signed_shard(folder, chance):
    path = chance.choice(sorted(folder.glob("[wo]*-*.safetensors")))
    tensors = load_file(path)
    key = chance.choice(sorted(tensors))
    change = chance.randrange(4)
    if change == 0:
        del tensors[key]
    elif change == 1:
        tensors[key] = tensors[key].reshape(-1)[:-1].clone()
    elif change == 2:
        tensors[f"{key}.old"] = tensors.pop(key)
    else:
        path.write_bytes(chance.randbytes(path.stat().st_size))
    if change < 3:
        save_file(tensors, path)
    sign(folder)
    return path


def unlisted(folder, chance):
    names = list(manifest(folder))
    name = chance.choice([n for n in names if n.startswith(("weights", "opt", "state", "index"))])
    sign(folder, [other for other in names if other != name])
    return Path(name)


SIGNED = [signed_json, signed_state, signed_config, signed_index, signed_shard, unlisted]
KINDS = [*ACCIDENTS, *ACCIDENTS, *SIGNED]


def state_of(engine):
    return [own.get(kind).detach().clone() for own in owned_slices(engine) for kind in own.kinds]


def try_all(intact, scratch, numbers):
    """Loads a copy with each damage into an engine; what was not refused as it should; for the
    pool."""
    run = parse_run(None, FLAGS)
    wrong = []
    with distributed(run.config.parallel) as groups:
        trainer = watched_trainer(run, groups, lambda result: None)
        for number in numbers:
            kind, save = KINDS[number % len(KINDS)], Path(scratch) / str(number)
            shutil.copytree(intact, save)
            damaged = kind(save / NAMED, random.Random(number))
            before = state_of(trainer.engine)
            message = refusal(trainer, save)
            names = {path.name for path in (damaged if isinstance(damaged, tuple) else (damaged,))}
            if "manifest.json" in names:
                names.add("latest")  # nothing but the tracker knows of a checkpoint without one
            if message is None or not any(name in message for name in names):
                wrong.append(f"{number}: {kind.__name__} of {damaged}: {message}")
            if kind in ACCIDENTS and not alike(before, state_of(trainer.engine)):
                wrong.append(f"{number}: {kind.__name__} of {damaged}: something was loaded")
            shutil.rmtree(save)
    return wrong


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refusal(trainer, save):
    """The message with which the trainer's way of loading refuses; None when it does not."""
    try:
        origin = resume.locate(
            dataclasses.replace(trainer.engine.config, checkpoint=CheckpointConfig(load=str(save)))
        )
        resume.load(trainer.engine, trainer.plan, origin)
    except CheckpointError as error:
        return str(error)
    return None


def loads(intact):
    """Whether the same way loads what is not damaged; for the pool."""
    run = parse_run(None, FLAGS)
    with distributed(run.config.parallel) as groups:
        trainer = watched_trainer(run, groups, lambda result: None)
        before = state_of(trainer.engine)
        message = refusal(trainer, intact)
        return message, alike(before, state_of(trainer.engine)[: len(before)])


@pytest.mark.proof
def test_what_is_not_damaged_is_loaded(pool, intact):
    assert pool.run(1, loads, str(intact))[0] == (None, False)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(SAMPLE), id=f"first {SAMPLE}"),
        pytest.param(range(SAMPLE, ALL), id=f"rest of {ALL}", marks=pytest.mark.proof),
    ],
)
def test_damage_is_refused_by_name(pool, intact, tmp_path, numbers):
    wrong = pool.run(1, try_all, str(intact), str(tmp_path), list(numbers))[0]
    assert not wrong, "\n".join(wrong)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def bombs(target):
    """Pickles as they are, and as torch.save and TorchScript lay them out."""
    yield pickle.dumps(Bomb(target), protocol=0)
    yield pickle.dumps(Bomb(target), protocol=4)
    for name in ("archive/data.pkl", "archive/constants.pkl"):
        path = target.with_name("bomb.zip")
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, pickle.dumps(Bomb(target), protocol=2))
            file.writestr("archive/version", "3")
        yield path.read_bytes()
        path.unlink()


FOREIGN = (
    "model_optim_rng.pt", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "pytorch_model.bin", "model.safetensors", "tokenizer/tokenizer.model", "tokenizer/vocab.pkl",
)  # fmt: skip
"""Names at which other programs, or other formats of this one, look for pickles."""


def explode(intact, scratch):
    """Every file of a checkpoint, and the trackers, as a pickle that leaves a trace; for the pool.

    Returns:
        What ran, and how many files were tried.
    """
    run = parse_run(None, FLAGS)
    trace, ran, tried = Path(scratch) / "trace", [], 0
    with distributed(run.config.parallel) as groups:
        trainer = watched_trainer(run, groups, lambda result: None)
        inside = [path.relative_to(intact) for path in files_of(Path(intact) / NAMED)]
        alongside = [path.relative_to(intact) for path in Path(intact).glob("latest*")]
        foreign = [Path(NAMED) / name for name in FOREIGN]
        for name in [*inside, *alongside, *foreign]:
            for number, bomb in enumerate(bombs(trace)):
                for signed in (False, True):
                    save = Path(scratch) / "save"
                    shutil.copytree(intact, save)
                    (save / name).write_bytes(bomb)
                    if signed and name.name != "manifest.json":
                        sign(save / NAMED)
                    message = refusal(trainer, save)
                    open_tokenizer(save / NAMED)
                    if trace.exists() or (message is None and name in inside and not signed):
                        ran.append(f"{name}, bomb {number}, signed {signed}: {message}")
                        shutil.rmtree(trace, ignore_errors=True)
                    shutil.rmtree(save)
                    tried += 1
    return ran, tried


def open_tokenizer(folder):
    """As tools do that take the tokenizer from a checkpoint; what it says of a bomb is its own."""
    config = TokenizerConfig(
        tokenizer_type="HFTokenizer", tokenizer_model=str(folder / "tokenizer")
    )
    with contextlib.suppress(Exception):
        build_tokenizer(config)


def test_no_file_is_ever_run(pool, intact, tmp_path):
    ran, tried = pool.run(1, explode, str(intact), str(tmp_path))[0]
    assert not ran, "\n".join(ran)
    assert tried > 100


def test_the_bombs_work(tmp_path):
    """Whoever unpickles one gets the folder."""
    (plain, *_) = bombs(tmp_path / "trace")
    pickle.loads(plain)
    assert (tmp_path / "trace").is_dir()
