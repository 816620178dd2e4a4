"""The newest checkpoint is damaged: the older whole one is named, and continued from where that is
wanted; nothing is lost or overwritten on the way."""

import shutil

import pytest
from safetensors.torch import load_file, save_file
from samples import sampled
from training_jobs import TINY, run

from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.manifest import INDEX, MANIFEST, file_facts, manifest, write_manifest
from megatron.checkpoint.source import open_checkpoint

FLAGS = [*TINY, "--zero-stage", "1", "--lr-decay-style", "constant", "--train-iters"]
EVERY = ["--save-interval", "2"]
PREVIOUS = ["--on-damaged-checkpoint", "previous"]
FORMATS = {
    "own": [],
    "deepspeed": ["--checkpoint-format", "deepspeed"],
    "universal": ["--save-universal"],
}


def flip(folder):
    _change(max(folder.glob("*"), key=lambda path: path.stat().st_size), -200)


def _change(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def cut(folder):
    path = max(
        (path for path in folder.glob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_manifest(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:100])


def no_manifest(folder):
    (folder / MANIFEST).unlink()


def neither_manifest_nor_index(folder):
    (folder / MANIFEST).unlink()
    (folder / INDEX).unlink()


def no_configuration(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    next(folder.glob("*1.safetensors")).unlink()


def no_states(folder):
    next(folder.glob("*model_states.pt")).unlink()


def no_folder(folder):
    shutil.rmtree(folder)


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def empty_tracker(folder):
    """Then nothing but the tracker is damaged."""
    (folder.parent / "latest").write_text("")


def tracker_of_anything(folder):
    (folder.parent / "latest").write_bytes(b"\xff\0../..")


def not_finite(folder):
    """As earlier versions saved it: whole, but of no use."""
    path = folder / "weights-00001.safetensors"
    tensors = load_file(path)
    for values in tensors.values():
        values.fill_(float("nan"))
    save_file(tensors, path)
    files = manifest(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, {**files, path.name: file_facts(path)})


TRACKERS = (empty_tracker, tracker_of_anything)
OWN = [
    *(flip, cut, cut_manifest, no_manifest, neither_manifest_nor_index, no_configuration),
    *(no_weights, no_folder, empty_folder, empty_tracker, tracker_of_anything, not_finite),
]
DEEPSPEED = [cut, no_states, no_folder, empty_folder, empty_tracker]
CASES = [
    *(("own", damage) for damage in OWN),
    *(("deepspeed", damage) for damage in DEEPSPEED),
    *(("universal", damage) for damage in (flip, cut_manifest, no_folder)),
]
SAMPLE = [("own", flip), ("deepspeed", cut)]


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """Checkpoints of steps 2, 4 and 6 of a run, by format."""
    made = {}

    def make(form):
        if form not in made:
            made[form] = tmp_path_factory.mktemp(form)
            pool.run(2, run, [*FLAGS, "6", *EVERY, "--save", str(made[form]), *FORMATS[form]])
        return made[form]

    return make


@pytest.mark.parametrize("form, damage", sampled(CASES, lambda case: case in SAMPLE))
def test_the_older_one_is_named_or_taken(pool, whole, tmp_path, form, damage):
    save = tmp_path / "save"
    shutil.copytree(whole(form), save)
    damage(save / "global_step6")
    before = names(save)
    flags = [*FLAGS, "6", *EVERY, "--save", str(save), "--load", str(save), "--keep-last", "2"]
    flags += FORMATS[form]
    (output, error), (_, other) = pool.run(2, run, flags)
    named = "global_step6" if damage in TRACKERS else "global_step4"
    for found in (error, other):
        assert found is not None and "\n" not in found
        assert f"{save}/{named}" in found and "--on-damaged-checkpoint previous" in found, found
    assert names(save) == before

    flags[len(FLAGS)] = "8"
    (output, error), _ = pool.run(2, run, [*flags, *PREVIOUS])
    assert error is None, error
    assert f"resumed from {save}/{named}" in output
    assert (save / "latest").read_text() == "global_step8"
    if damage not in (no_folder, *TRACKERS):
        aside = save / ".global_step6.damaged"
        assert aside.is_dir() and str(aside) in output
    if form == "own":
        assert complete_tags(save) == ["global_step6", "global_step8"]
    same(save / "global_step6", whole(form) / "global_step6")


def names(save):
    return sorted(path.name for path in save.iterdir() if path.name != ".lock")


def same(ours, theirs):
    found, wanted = open_checkpoint(ours), open_checkpoint(theirs)
    for name in wanted.names():
        for kind in wanted.kinds(name):
            assert found.tensor(name, kind).equal(wanted.tensor(name, kind)), (name, kind)


def test_two_damaged_ones_and_none_whole(pool, whole, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(whole("own"), save)
    flags = [*FLAGS, "8", "--load", str(save)]
    flip(save / "global_step6")
    cut(save / "global_step4")
    error = pool.run(2, run, flags)[1][1]
    assert f"the older {save}/global_step2 is whole" in error
    output, error = pool.run(2, run, [*flags, *PREVIOUS])[0]
    assert error is None and f"resumed from {save}/global_step2" in output
    # Without --save here nothing of the folder changes.
    assert (save / "global_step6").is_dir() and (save / "latest").read_text() == "global_step6"
    flip(save / "global_step2")
    for mode in ([], PREVIOUS):
        error = pool.run(2, run, [*flags, *mode])[0][1]
        assert "global_step6" in error and f"no older checkpoint in {save} is whole" in error


@pytest.mark.proof
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_universal_copy_that_is_damaged(pool, whole, tmp_path, damage):
    save = tmp_path / "save"
    shutil.copytree(whole("universal"), save)
    copy = save / "global_step6_universal"
    damage(copy / "zero" / "embedding.word_embeddings.weight")
    flags = [*FLAGS, "6", "--save", str(save), "--load", str(save), "--universal-checkpoint"]
    older = f"{save}/global_step4_universal"
    assert f"the older {older} is whole" in pool.run(2, run, flags)[1][1]
    output, error = pool.run(2, run, [*flags, *PREVIOUS])[0]
    assert error is None and f"resumed from {older}" in output
    assert (save / ".global_step6_universal.damaged").is_dir() and not copy.exists()
    assert (save / "latest_universal").read_text().strip() == "global_step4_universal"
