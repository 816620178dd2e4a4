"""--rope-scaling: what is read from its JSON, and what is refused."""

import json

import pytest

from megatron.config import ConfigError
from megatron.config.positions import EXAMPLE, RopeScaling, llama3_scaling

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}

READ = [
    ({"rope_type": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
    ({"type": "linear", "factor": 2.5}, RopeScaling("linear", 2.5)),
    ({"rope_type": "linear", "type": "linear", "factor": 2.5}, RopeScaling("linear", 2.5)),
    ({"rope_type": "default"}, RopeScaling("default")),
    (
        {
            "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        },
        llama3_scaling(8.0),
    ),
    (
        LONG | {"short_factor": [1, 2], "long_factor": [3.5, 4], "attention_factor": None},
        RopeScaling(
            "longrope", original_max_position_embeddings=64, short_factor=(1.0, 2.0),
            long_factor=(3.5, 4.0),
        ),
    ),
    (
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "truncate": False, "beta_fast": 16,
        },
        RopeScaling(
            "yarn", 4.0, original_max_position_embeddings=64, truncate=False, beta_fast=16.0
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "expected"), READ, ids=lambda v: str(v)[:40])
def test_read_and_written_again(form, expected):
    found = RopeScaling.parse(json.dumps(form), 2)
    assert found == expected
    assert RopeScaling.parse(found.to_json(), 2) == found


REFUSED = [
    ("linear", "is not valid JSON"),
    ("[2]", "must be a JSON object"),
    ("{}", "rope_type is None; it must be one of default, linear"),
    ('{"rope_type": "su"}', "rope_type is 'su'"),
    ('{"rope_type": ["linear"]}', "rope_type is"),
    ('{"rope_type": "linear"}', "linear needs factor"),
    ('{"rope_type": "linear", "factor": null}', "linear needs factor"),
    ('{"rope_type": "linear", "factor": 2, "beta_fast": 1}', "linear has no parameter beta_fast"),
    ('{"rope_type": "default", "factor": 2}', "default has no parameter factor; it has none"),
    ('{"rope_type": "linear", "factor": 0}', "factor must be a positive number"),
    ('{"rope_type": "linear", "factor": "2"}', "factor must be a positive number"),
    ('{"rope_type": "linear", "factor": true}', "factor must be a positive number"),
    (
        '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1.5}',
        "original_max_position_embeddings must be a positive integer",
    ),
    (
        '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "truncate": 1}',
        "truncate must be true or false",
    ),
    (
        json.dumps(LONG | {"short_factor": [1], "long_factor": [1, 1]}),
        "short_factor must be a list of 2 positive numbers",
    ),
    (
        json.dumps(LONG | {"short_factor": [1, 1], "long_factor": [1, -1]}),
        "long_factor must be a list of 2 positive numbers",
    ),
    (
        json.dumps(json.loads(llama3_scaling(8.0).to_json()) | {"high_freq_factor": 1.0}),
        "high_freq_factor 1 must be above low_freq_factor 1",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused(text, message):
    with pytest.raises(ConfigError) as error:
        RopeScaling.parse(text, 2)
    assert message in str(error.value) and str(error.value).startswith(f"--rope-scaling {text}")


def test_the_example_of_messages_is_right():
    assert RopeScaling.parse(EXAMPLE, 2).rope_type == "linear"
