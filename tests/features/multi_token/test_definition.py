"""Losses and gradients of multi-token prediction against the definition of DeepSeek-V3's report
(arXiv:2412.19437, section 2.2), written in torch: document by document, on sequences that get one
token shorter with each further token, without shifts, masks or padding.

Shapes: T tokens of a document, H hidden, N heads, D head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from configs import model_config, run_config
from torch import Tensor

from megatron.config import ParallelConfig
from megatron.data.gpt_batch import GPTBatch, GPTCollator
from megatron.families import build_model, spec_of
from megatron.features.evaluation.scoring import TEXT_SCORES, token_scores
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.features.multi_token.layers import with_losses_ahead
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init

VOCAB, LENGTH, HEADS, WIDTH = 40, 12, 4, 4
EOD = 7
PLAIN = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": HEADS,
    "kv_channels": WIDTH, "seq_length": LENGTH, "max_position_embeddings": LENGTH,
    "make_vocab_size_divisible_by": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "mtp_loss_scaling_factor": 0.3,
}  # fmt: skip


class Definition:
    """The model in formulas, from parameters by canonical name."""

    def __init__(self, params: dict[str, Tensor], layers: int, epsilon: float) -> None:
        self.params, self.layers, self.epsilon = params, layers, epsilon

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return x * scale * self.params[f"{name}.weight"]

    def rotated(self, x_TND: Tensor) -> Tensor:
        half = WIDTH // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x_TND), dtype=torch.float64)[:, None, None] * rates
        a, b = x_TND[..., :half], x_TND[..., half:]
        c, s = angles.cos(), angles.sin()
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    def block(self, x_TH: Tensor, name: str) -> Tensor:
        p, T = self.params, len(x_TH)
        qkv = self.norm(x_TH, f"{name}.attention_norm") @ p[f"{name}.attention.qkv.weight"].T
        q, k, v = (each.view(T, HEADS, WIDTH) for each in qkv.chunk(3, dim=-1))
        scores = torch.einsum("ind,jnd->nij", self.rotated(q), self.rotated(k)) / WIDTH**0.5
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        mixed = torch.einsum("nij,jnd->ind", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x_TH = x_TH + mixed.reshape(T, -1) @ p[f"{name}.attention.proj.weight"].T
        gate, up = (self.norm(x_TH, f"{name}.mlp_norm") @ p[f"{name}.mlp.up.weight"].T).chunk(2, -1)
        return x_TH + (F.silu(gate) * up) @ p[f"{name}.mlp.down.weight"].T

    def losses(self, tokens_T: Tensor, label: int | None, further: int, repeated: bool) -> list:
        """The cross entropies of a document's next tokens, and of each further one; ``label`` is
        the token after the document, None where it is another one's."""
        p = self.params
        head = p.get("output_layer.weight", p["embedding.word_embeddings.weight"])
        text_T = tokens_T if label is None else torch.cat((tokens_T, torch.tensor([label])))
        table = p["embedding.word_embeddings.weight"]
        x_TH = table[tokens_T]
        for n in range(self.layers):
            x_TH = self.block(x_TH, f"layers.{n}")
        x_TH = self.norm(x_TH, "final_norm.norm")
        actual = []
        for depth in range(further + 1):
            if depth:
                name = f"mtp.{0 if repeated else depth - 1}"
                if len(x_TH) < 2:
                    actual.append(x_TH.new_zeros(0))
                    x_TH = x_TH[:0]
                    continue
                merged = torch.cat(
                    (
                        self.norm(table[tokens_T[depth:]], f"{name}.embed_norm"),
                        self.norm(x_TH[:-1], f"{name}.hidden_norm"),
                    ),
                    dim=-1,
                )
                x_TH = self.block(merged @ p[f"{name}.merge.weight"].T, f"{name}.block")
                x_TH = self.norm(x_TH, f"{name}.norm")
            labels_T = text_T[depth + 1 :]
            logits_TV = x_TH[: len(labels_T)] @ head[:VOCAB].T
            actual.append(F.cross_entropy(logits_TV, labels_T, reduction="none"))
        return actual


def case(**changes):
    model = run_config(model=model_config(**(PLAIN | changes))).with_vocabulary(VOCAB).model
    stack = build_model(model, ParallelConfig()).double()
    for name, param in stack.canonical_parameters():
        param.init = Init(std=0.4, constant=1.0) if "norm" in name else Init(std=0.4)
        initialise(name, param, 1)
    return model, stack, with_losses_ahead(spec_of(model), model)


def text(rows: int = 2) -> Tensor:
    random = torch.Generator().manual_seed(3)
    text_BT = torch.randint(VOCAB, (rows, LENGTH + 1), generator=random)
    text_BT[text_BT == EOD] += 1
    return text_BT


def sample(documents: bool) -> GPTBatch:
    text_BT = text()
    if documents:
        text_BT[0, [0, 4, 5, 9]] = EOD  # documents of 1, 4, 1, 4 and 2 tokens
        text_BT[1, LENGTH - 1] = EOD
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": False}
    collate = GPTCollator(EOD, **flags) if documents else GPTCollator()
    return collate(list(text_BT.numpy()))


def documents_of(batch: GPTBatch):
    """Tokens of each document and the token after it, None where that is another document's."""
    for row, tokens_S in enumerate(batch.tokens_BS):
        ids_S = torch.zeros(LENGTH) if batch.document_ids_BS is None else batch.document_ids_BS[row]
        starts = [0, *(ids_S.diff().nonzero().flatten() + 1).tolist(), LENGTH]
        for begin, end in zip(starts, starts[1:], strict=False):
            yield tokens_S[begin:end], int(batch.labels_BS[row, end - 1]), end == LENGTH


MODELS = {
    "one": {"mtp_num_layers": 1},
    "three": {"mtp_num_layers": 3},
    "untied": {"mtp_num_layers": 2, "untie_embeddings_and_output_weights": True},
    "repeated": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
}


SAMPLE = {("three", True), ("repeated", False)}
CASES = [
    pytest.param(name, documents, marks=() if (name, documents) in SAMPLE else pytest.mark.proof)
    for name in MODELS
    for documents in (False, True)
]


@pytest.mark.parametrize(("name", "documents"), CASES)
def test_losses_and_gradients_by_the_definition(name, documents):
    """With documents the model's own loss also has the first tokens of the next ones, whose label
    is in the batch; those of the further tokens have not."""
    model, stack, spec = case(**MODELS[name])
    part, batch = model.part(MultiTokenConfig), sample(documents)
    losses = stack(spec.begin(batch)).losses
    params = dict(stack.canonical_parameters())
    total = spec.total(losses)
    ours = torch.autograd.grad(total, list(params.values()))

    definition = Definition(params, model.num_layers, model.norm.norm_epsilon)
    terms = [[] for _ in range(part.blocks_ahead + 1)]
    for tokens_T, label, ends in documents_of(batch):
        further = definition.losses(
            tokens_T, label if ends else None, part.blocks_ahead, part.mtp_use_repeated_layer
        )
        own = definition.losses(tokens_T, label, 0, False)
        for depth, values in enumerate([own[0], *further[1:]]):
            terms[depth].append(values)
    means = [torch.cat(each).mean() for each in terms]
    for depth, mean in enumerate(means[1:]):
        torch.testing.assert_close(losses[f"mtp_{depth}_loss"], mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(losses["lm loss"], means[0], rtol=1e-12, atol=0)
    expected = means[0] + 0.3 * sum(means[1:]) / part.blocks_ahead
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(expected, list(params.values()))
    for key, mine, reference in zip(params, ours, gradients, strict=True):
        scale = max(float(reference.abs().max()), 1e-3)
        assert float((mine - reference).abs().max()) < 1e-12 * scale, key


def test_detached_losses_change_their_own_blocks_only():
    model, stack, spec = case(mtp_num_layers=2, mtp_detach_heads=True)
    alone = case(mtp_num_layers=2)[1:]
    batch = sample(documents=False)
    params = dict(stack.canonical_parameters())
    losses = stack(spec.begin(batch)).losses
    ahead = losses["mtp_0_loss"] + losses["mtp_1_loss"]
    for name, grad in zip(
        params, torch.autograd.grad(ahead, list(params.values()), allow_unused=True), strict=True
    ):
        changes = grad is not None and bool(grad.abs().sum() > 0)
        assert changes == name.startswith("mtp."), name
    free = alone[0](alone[1].begin(batch)).losses
    assert all(torch.equal(losses[name], free[name]) for name in losses)


def test_positions_of_the_head_change_nothing():
    """A batch that says where its loss counts has the same losses, in rows or of all together."""
    model, stack, spec = case(mtp_num_layers=2)
    batch = sample(documents=True)
    mask_BS = torch.rand(batch.loss_mask_BS.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask_BS[1, :4] = True  # the beginning of a row, which no place is before
    batch = batch._replace(loss_mask_BS=mask_BS.float())
    expected = stack(spec.begin(batch)).losses
    positions = mask_BS.flatten().nonzero().T
    for positions_BP in (
        positions,
        (~mask_BS).byte().argsort(dim=1, stable=True)[:, : int(mask_BS.sum(1).max())],
    ):
        actual = stack(spec.begin(batch._replace(positions_BP=positions_BP))).losses
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=0)


def test_losses_ahead_have_the_weight_of_their_micro_batch():
    """Where the model's own loss has a weight among the micro batches of a step, so have they."""
    _, stack, spec = case(mtp_num_layers=1)
    batch = sample(documents=False)._replace(weights_2=torch.tensor([0.5, 2.0]).double())
    plain = stack(spec.begin(batch)).losses

    def halved(inputs, batch):
        from megatron.parallel.cross_entropy import linear_cross_entropy

        return {"lm loss": linear_cross_entropy(*inputs[:2], *inputs[3:], inputs[2])}

    begin = spec.begin(batch).changed(objective=halved)
    weighed = stack(begin).losses
    assert torch.equal(weighed["mtp_0_loss"], plain["mtp_0_loss"] * 0.5)
    assert torch.equal(weighed["lm loss"], plain["lm loss"])


def test_texts_are_scored_and_written_without():
    """Where there are no labels, or they are to be scored, nothing further is predicted."""
    model, stack, spec = case(mtp_num_layers=1)
    plain = dataclasses.replace(model.flags(), mtp_num_layers=None).resolve()
    without = build_model(plain.with_vocabulary(VOCAB), ParallelConfig()).double()
    weights = dict(stack.canonical_parameters())
    for name, param in without.canonical_parameters():
        param.data = weights[name].data
    begin = spec.begin(sample(documents=False))
    for state in (begin.changed(targets=None), TEXT_SCORES.start(begin)):
        actual, expected = stack(state), without(state.changed(ahead=()))
        assert torch.equal(actual.hidden, expected.hidden)
        assert actual.losses.keys() == expected.losses.keys()
        if state.targets is not None:
            found, wanted = token_scores(actual), token_scores(expected)
            assert torch.equal(found.log_probs_BP, wanted.log_probs_BP)
