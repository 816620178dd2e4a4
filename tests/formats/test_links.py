"""Folders that others made, with links to files of the user who converts them: nothing of these
gets into what is written, and so into what is uploaded."""

import json
import os
import shutil

import pytest
from tool_modules import load_program

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import file_facts, manifest, verify, write_manifest
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import copy_tokenizer_files
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.tokenizer.plain import NullTokenizer

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def checkpoint(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    return write_checkpoint(tmp_path / "save", config, random_gpt(config), NullTokenizer(60))


@pytest.fixture
def model(tmp_path, checkpoint):
    """A folder of Hugging Face."""
    tool = load_program("tools/convert_checkpoint.py")
    tool.main(["to-hf", "--load", str(checkpoint), "--output", str(tmp_path / "hf")])
    return tmp_path / "hf"


def sign(folder):
    """Lists every file, links too, as they are: what the attacker can do who knows the content."""
    (folder / "manifest.json").unlink()
    names = [path for path in folder.rglob("*") if path.is_file()]
    write_manifest(folder, {str(path.relative_to(folder)): file_facts(path) for path in names})


def contents(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["id_rsa", "vocab.txt", "chat_template.jinja", "merges.txt"])
@pytest.mark.parametrize("signed", [False, True])
def test_a_link_in_the_tokenizer_of_a_checkpoint(signed, name, checkpoint, secret, tmp_path):
    (checkpoint / "tokenizer" / name).symlink_to(secret)
    if signed:
        sign(checkpoint)
        verify(checkpoint)
    else:
        with pytest.raises(CheckpointError, match=f"{name} is not part of the checkpoint"):
            verify(checkpoint)
    copied = tmp_path / "copied"
    if name == "id_rsa":  # no tokenizer has such a file
        assert CheckpointReader(checkpoint).copy_tokenizer(copied)
    else:
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*home/id_rsa"):
            CheckpointReader(checkpoint).copy_tokenizer(copied)
    assert SECRET.encode() not in contents(copied)


@pytest.mark.parametrize("command", ["to-hf", "to-universal", "to-megatron"])
def test_no_conversion_copies_it(command, checkpoint, secret, tmp_path):
    (checkpoint / "tokenizer" / "chat_template.jinja").symlink_to(secret)
    sign(checkpoint)
    tool, output = load_program("tools/convert_checkpoint.py"), tmp_path / "output"
    with pytest.raises(SystemExit, match="chat_template.jinja is a link to"):
        tool.main([command, "--load", str(checkpoint), "--output", str(output)])
    assert not output.exists() or SECRET.encode() not in contents(output)


def test_links_of_folders(checkpoint, secret, tmp_path):
    shutil.rmtree(checkpoint / "tokenizer")
    (checkpoint / "tokenizer").symlink_to(secret.parent)
    (secret.parent / "vocab.txt").write_text(SECRET)
    with pytest.raises(CheckpointError, match="tokenizer is a link, not the folder"):
        CheckpointReader(checkpoint).copy_tokenizer(tmp_path / "copied")
    with pytest.raises(CheckpointError, match="tokenizer"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer/modeling.py", "tokenizer/.x/../y", "a/b"])
def test_unlisted_files_fail_verification(name, checkpoint):
    (checkpoint / name).parent.mkdir(exist_ok=True, parents=True)
    (checkpoint / name).write_text("x")
    with pytest.raises(CheckpointError, match="is not part of the checkpoint: .*move it away"):
        verify(checkpoint)


def test_what_file_systems_and_users_leave_is_no_alarm(checkpoint, tmp_path):
    for name in (".nfs0001", "tokenizer/.DS_Store", "tokenizer/._vocab.json"):
        (checkpoint / name).write_text("x")
    weights = checkpoint / "weights-00000.safetensors"
    shutil.move(weights, tmp_path / "on-another-disk")
    weights.symlink_to(tmp_path / "on-another-disk")  # it has the content that the manifest says
    verify(checkpoint)
    (tmp_path / "link").symlink_to(checkpoint)
    assert CheckpointReader(tmp_path / "link").copy_tokenizer(tmp_path / "copied")
    assert set(manifest(checkpoint)) >= {
        f"tokenizer/{path.name}" for path in (tmp_path / "copied").iterdir()
    }


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt", "generation_config.json"])
def test_a_link_in_a_model_of_hugging_face(name, model, secret, tmp_path):
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(os.path.relpath(secret, model))
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*home/id_rsa"):
        HuggingFaceFolder(model).copy_tokenizer(tmp_path / "copied")
    assert SECRET.encode() not in contents(tmp_path / "copied")


def cached(model, folder):
    """The folder as Hugging Face's client stores it: links into blobs."""
    snapshot = folder / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        blob = snapshot.parent.parent / "blobs" / f"{number:040x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_hugging_face_s_cache_is_copied(model, tmp_path):
    snapshot = cached(model, tmp_path / "real")
    (tmp_path / "cache").symlink_to(tmp_path / "real")  # on a larger disk
    for folder in (snapshot, tmp_path / "cache" / "models--a--b" / "snapshots" / ("0" * 40)):
        target = tmp_path / f"copied-from-{folder.parts[-4]}"
        assert HuggingFaceFolder(folder).copy_tokenizer(target)
        for path in target.iterdir():
            assert path.read_bytes() == (model / path.name).read_bytes() and not path.is_symlink()


def test_a_cache_that_others_made(model, secret, tmp_path):
    """Its blobs are links, or the folder of blobs is one."""
    snapshot = cached(model, tmp_path)
    blob = (snapshot / "tokenizer_config.json").resolve()
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(CheckpointError, match="tokenizer_config.json is a link to .*id_rsa"):
        HuggingFaceFolder(snapshot).copy_tokenizer(tmp_path / "a")
    blobs = snapshot.parent.parent / "blobs"
    shutil.move(blobs, secret.parent / "blobs")
    blobs.symlink_to(secret.parent / "blobs")
    with pytest.raises(CheckpointError, match="is a link to"):
        HuggingFaceFolder(snapshot).copy_tokenizer(tmp_path / "b")


def test_special_files(model, tmp_path):
    (model / "vocab.txt").symlink_to("/dev/zero")
    os.mkfifo(model / "merges.txt")
    (model / "added_tokens.json").mkdir()
    assert HuggingFaceFolder(model).copy_tokenizer(tmp_path / "copied")
    names = {path.name for path in (tmp_path / "copied").iterdir()}
    assert not names & {"vocab.txt", "merges.txt", "added_tokens.json"}
    assert json.loads((tmp_path / "copied" / "tokenizer.json").read_text())


def test_a_folder_within_a_snapshot_of_the_cache(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "1f" / "original"
    blob = tmp_path / "models--a--b" / "blobs" / "2e"
    for made in (folder, blob.parent):
        made.mkdir(parents=True)
    blob.write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../../blobs/2e")
    copy_tokenizer_files(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"


def test_a_path_of_whoever_saved_the_settings_is_not_copied(tmp_path):
    (tmp_path / "from").mkdir()
    content = {"_name_or_path": "/home/someone/base", "top_p": 0.5}
    (tmp_path / "from" / "generation_config.json").write_text(json.dumps(content))
    copy_tokenizer_files(tmp_path / "from", tmp_path / "copy")
    assert read_json(tmp_path / "copy" / "generation_config.json") == {"top_p": 0.5}


def test_files_that_no_tokenizer_has_are_not_copied(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="config.json cannot be read: it has 1,099,"):
        read_json(tmp_path / "config.json")
    for number, (size, start) in enumerate([(1 << 40, ""), (40_000, '{"a":')]):
        with (tmp_path / "generation_config.json").open("w") as file:
            file.write(start * 5000)
            file.truncate(max(size, 5 * 5000))
        with pytest.raises(CheckpointError, match="generation_config.json (has more|is not valid)"):
            copy_tokenizer_files(tmp_path, tmp_path / f"copy{number}")
