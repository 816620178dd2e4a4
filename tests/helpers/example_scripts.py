"""Runs a script of examples_deepspeed/, by default so that it prints its command."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from megatron.config import FLAG_CLASSES, FlagParser, Setting, resolve
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.families import family_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples_deepspeed"
SETTINGS = {
    "DRY_RUN": "1",
    "DATA_PATH": "0.3 data/a 0.7 data/b",
    "VOCAB_FILE": "my vocab.json",
    "MERGE_FILE": "merges.txt",
    "CHECKPOINT_PATH": "my checkpoints",
    "ONEFLOW_GPT_NODE_IPS": "a,b,c,d",
}

PROGRAM = (
    r"finetune\.py|(pretrain|finetune)_\w+\.py"
    r"|(tasks|tasks/eval_harness|tools|tools/retro|"
    r"examples_deepspeed/((megatron/)?detxoify_lm|data_efficiency))/\w+\.py"
)


def script(path, *flags, **settings):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(path), *flags],
        env=kept | SETTINGS | settings,
        capture_output=True,
        text=True,
        check=False,
    )


def printed(path, *flags, **settings):
    result = script(path, *flags, **settings)
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    words_of_ours = (at for at, word in enumerate(words) if re.fullmatch(PROGRAM, word))
    cut = next(at for at in words_of_ours if words[at] != "tools/start_nodes.py")
    return words[:cut], words[cut + 1 :]


def resolved(flags, world_size, family="gpt"):
    """Return the configuration of a run on that many processes."""
    given = FlagParser(*FLAG_CLASSES).settings(flags)
    settings = family_of(family).complete_settings(
        {"family": Setting(family, "this program")} | given
    )
    if "deepspeed_config" in settings:
        file = ROOT / settings["deepspeed_config"].value
        settings = deepspeed_json.merge(settings, read_json(str(file)), str(file), world_size)
    return resolve(settings, world_size=world_size).config
