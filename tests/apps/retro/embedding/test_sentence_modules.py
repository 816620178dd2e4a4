"""Folders of sentence-transformers, compared with the definitions of their modules, and with the
package where it is installed."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_encoders import TEXTS, WIDTH, states_alone

from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding import build_embedder
from megatron.config import ConfigError

LONGEST = 20
POOLINGS = {
    "cls": lambda states_SH: states_SH[0],
    "max": lambda states_SH: states_SH.amax(0),
    "mean": lambda states_SH: states_SH.mean(0),
    "mean_sqrt_len_tokens": lambda states_SH: states_SH.sum(0) / len(states_SH) ** 0.5,
    "weightedmean": lambda states_SH: torch.stack(
        [(n + 1) * state_H for n, state_H in enumerate(states_SH)]
    ).sum(0) / sum(range(1, len(states_SH) + 1)),
    "lasttoken": lambda states_SH: states_SH[-1],
}  # fmt: skip


def write_folder(folder, encoder, pooling, modules=(), settings=None, prompts=None):
    """As the package writes it: ``pooling`` is the content of its config.json, and ``modules`` are
    names with settings and weights of what follows."""
    entries = [("", "Transformer"), ("1_Pooling", "Pooling")]
    shutil.copytree(encoder, folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings or {}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for number, (name, content, weights) in enumerate(modules, 2):
        path = folder / f"{number}_{name}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(content))
        if weights:
            save_file(weights, path / "model.safetensors")
        entries.append((path.name, name))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (path, name) in enumerate(entries)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def embedder_of(folder, **flags):
    return build_embedder(
        EmbedderFlags(bert_load=str(folder), bert_embedder_type="huggingface", **flags)
    )


def pooled(encoder, names, texts=TEXTS, most=LONGEST):
    """Vectors by definition; zeros for texts without tokens, whatever their special ones say."""
    rows = []
    for text in texts:
        text = text.replace("<|endoftext|>", "")
        states_SH = states_alone(encoder, text, most)
        row = torch.cat([POOLINGS[name](states_SH) for name in names])
        rows.append(row if text else torch.zeros_like(row))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("names", "new"),
    [
        (("mean",), True),
        (tuple(POOLINGS), False),
        *(
            pytest.param(names, new, marks=pytest.mark.proof)
            for names, new in [
                (("mean",), False), (tuple(POOLINGS), True),
                (("cls", "max"), False), (("cls", "max"), True),
            ]
        ),
    ],
)  # fmt: skip
def test_poolings(names, new, encoder, tmp_path):
    keys = {"cls": "cls_token", "lasttoken": "lasttoken"}
    old = {f"pooling_mode_{keys.get(n, n.removesuffix('_tokens') + '_tokens')}" for n in names}
    pooling = {"pooling_mode": list(names)} if new else dict.fromkeys(old, True)
    folder = write_folder(tmp_path / "st", encoder, pooling, settings={"max_seq_length": LONGEST})
    embedder = embedder_of(folder, retro_bert_batch_size=3)
    assert embedder.width == WIDTH * len(names)
    wanted = pooled(encoder, names)
    np.testing.assert_allclose(embedder.embed(TEXTS), wanted, rtol=1e-6, atol=2e-6)


def test_modules_after_the_pooling(encoder, tmp_path):
    """A dense layer with an activation, one without weights for its bias, and a length of 1."""
    torch.manual_seed(2)
    weight, bias, second = torch.randn(8, WIDTH), torch.randn(8), torch.randn(5, 8)
    gelu = {"activation_function": "torch.nn.modules.activation.GELU"}
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    modules = [
        ("Dense", gelu, {"linear.weight": weight, "linear.bias": bias}),
        ("Dense", identity, {"linear.weight": second}),
        ("Normalize", {}, {}),
    ]
    folder = write_folder(tmp_path / "st", encoder, {"pooling_mode": "mean"}, modules)
    embedder = embedder_of(folder, retro_bert_max_chunk_length=LONGEST)
    states = pooled(encoder, ["mean"])
    hidden = torch.nn.functional.gelu(states @ weight.double().T + bias) @ second.double().T
    wanted = hidden / hidden.norm(dim=1, keepdim=True)
    wanted[states.norm(dim=1) == 0] = 0
    np.testing.assert_allclose(embedder.embed(TEXTS), wanted, rtol=1e-6, atol=1e-6)
    plain = write_folder(tmp_path / "plain", encoder, {"pooling_mode": "mean"}, modules[:2])
    assert embedder_of(plain).identity["weights"] == embedder.identity["weights"]
    assert embedder_of(plain).identity["modules"] != embedder.identity["modules"]


def test_prompts_and_case(encoder, tmp_path):
    """A prompt is read with each text, and is no text of its own."""
    folder = write_folder(
        tmp_path / "st", encoder, {"pooling_mode": "mean"}, settings={"do_lower_case": True},
        prompts={"prompts": {"passage": "FOX: "}, "default_prompt_name": "passage"},
    )  # fmt: skip
    embedder = embedder_of(folder)
    texts = [text and f"fox: {text.lower()}" for text in ("The Dog", "", "x")]
    wanted = pooled(encoder, ["mean"], texts)
    np.testing.assert_allclose(embedder.embed(["The Dog", "", "x"]), wanted, rtol=1e-6, atol=1e-6)
    assert embedder.lengths(["The Dog", ""]).tolist() == [len_of("the dog", encoder), 0]


def len_of(text, encoder):
    return len(states_alone(encoder, text)) - 2


def test_modules_that_are_not_known(encoder, tmp_path):
    cases = {
        "LSTM": ({"pooling_mode": "mean"}, [("LSTM", {}, {})]),
        "pooling_mode median": ({"pooling_mode": "median"}, []),
        "include_prompt": ({"pooling_mode": "mean", "include_prompt": False}, []),
        "activation_function mine.Relu": (
            {"pooling_mode": "mean"},
            [("Dense", {"activation_function": "mine.Relu"}, {"linear.weight": torch.ones(2, 24)})],
        ),
    }
    for number, (told, (pooling, modules)) in enumerate(cases.items()):
        folder = write_folder(tmp_path / str(number), encoder, pooling, modules)
        with pytest.raises(ConfigError, match=told):
            embedder_of(folder)


@pytest.mark.proof
@pytest.mark.parametrize("mode", [*POOLINGS, ("cls", "mean")], ids=str)
def test_against_the_package(mode, encoder, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    transformer = Transformer(str(encoder), max_seq_length=LONGEST)
    pooling = Pooling(WIDTH, mode)
    dense = Dense(WIDTH * (1 if isinstance(mode, str) else len(mode)), 10)
    for extra in ([], [dense, Normalize()]):
        model = package.SentenceTransformer(modules=[transformer, pooling, *extra], device="cpu")
        folder = tmp_path / str(len(extra))
        model.save(str(folder))
        texts = [text.replace("<|endoftext|>", "") for text in TEXTS]
        texts = [text for text in texts if text]
        wanted = model.encode(texts, batch_size=3)
        found = embedder_of(folder).embed(texts)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
