"""Keys of DeepSpeed's JSON, as one version of DeepSpeed reads or refuses them; into keys.json here.

Run once for each version, in a source distribution that was unpacked and is not installed::

    pip download --no-deps --no-binary deepspeed deepspeed==0.19.8
    tar xzf deepspeed-0.19.8.tar.gz
    DS_ACCELERATOR=cpu PYTHONPATH=deepspeed-0.19.8 python tests/golden/deepspeed_json/record.py
"""

import json
from pathlib import Path

import deepspeed
from deepspeed.runtime import config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

KEYS = Path(__file__).with_name("keys.json")


class Recording(dict):
    """A JSON object that records the keys that are asked for."""

    def __init__(self, *content):
        super().__init__(*content)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __copy__(self):
        return self


def main() -> None:
    content = Recording({"train_micro_batch_size_per_gpu": 1})
    config.DeepSpeedConfig(content)
    removed = getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    removed_zero = getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    keys = json.loads(KEYS.read_text()) if KEYS.exists() else {}
    keys[deepspeed.__version__.split("+")[0].strip()] = {
        "read": " ".join(sorted(content.asked - set(removed))),
        "refused": " ".join(sorted(removed)),
        "read_zero": " ".join(sorted(set(DeepSpeedZeroConfig.model_fields) - set(removed_zero))),
        "refused_zero": " ".join(sorted(removed_zero)),
    }
    KEYS.write_text(json.dumps(dict(sorted(keys.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
