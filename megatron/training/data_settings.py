"""Settings that a run takes from the corpora it reads."""

from __future__ import annotations

from megatron.config import ConfigError, DataConfig, Setting, Settings
from megatron.data.corpora import read_corpora
from megatron.data.run_data import KINDS
from megatron.data.sources import is_weight

_NAMING = ("train_data", "valid_data", "test_data")


def with_corpora(settings: Settings) -> Settings:
    """Adds the tokenizer that the corpora of --train-data and the like were tokenized with.

    Raises:
        ConfigError: the flags, or two corpora, contradict each other.
    """
    given = {name: settings[name].value for name in _NAMING if name in settings}
    if not any(given.values()):
        return settings
    file = settings["corpora_file"].value if "corpora_file" in settings else DataConfig.corpora_file
    corpora = read_corpora(file, KINDS)
    found = dict(settings)
    for field, words in given.items():
        flag = "--" + field.replace("_", "-")
        names = [word for word in words if not is_weight(word)]
        for corpus, tokenizer in corpora.tokenizers(names, flag):
            origin = f"{file}: {corpus}"
            for name, value in tokenizer.items():
                before = found.setdefault(name, Setting(value, origin))
                if before.value != value:
                    raise ConfigError(
                        f"{before.origin} has {name} {before.value}, but {origin} was tokenized "
                        f"with {value}: data of one run have one tokenizer"
                    )
    return found
