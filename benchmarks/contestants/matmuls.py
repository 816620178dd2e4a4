"""The matrix products of a step alone: forward, and the two of each in the backward pass.

Nothing is between them: no norms, no softmax, no loss, no optimizer, and no new memory but for the
scores, which are never there as a whole. The attention's two products are made causally, in as many
pieces of the queries as :data:`PIECES` says, each against the keys up to its end: (1 + 1 / PIECES)
/ 2 of the whole products.

Shapes: T tokens, I inputs, O outputs, G batch x heads, S sequence, D head width.
"""

from __future__ import annotations

import torch

from contestants.registry import AfterStep, Contestant
from contestants.setting import Setting

PIECES = 8


class Linear:
    """The three products of a linear layer."""

    def __init__(self, tokens: int, inputs: int, outputs: int, **how: object) -> None:
        self.x_TI, self.y_TO, self.weight_OI = (
            torch.randn(shape, **how)  # type: ignore[call-overload]
            for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        self.grad_TI, self.grad_OI = torch.empty_like(self.x_TI), torch.empty_like(self.weight_OI)

    def __call__(self) -> None:
        """The output, its gradient to the input and to the weight."""
        torch.mm(self.x_TI, self.weight_OI.t(), out=self.y_TO)
        torch.mm(self.y_TO, self.weight_OI, out=self.grad_TI)
        torch.mm(self.y_TO.t(), self.x_TI, out=self.grad_OI)


class Attention:
    """Scores and the mix of values, causally, and the two products of each in the backward pass."""

    def __init__(self, groups: int, length: int, width: int, **how: object) -> None:
        self.q, self.k, self.v, self.y = (
            torch.randn(groups, length, width, **how)  # type: ignore[call-overload]
            for _ in range(4)
        )
        self.length, self.piece = length, -(-length // PIECES)

    def __call__(self) -> None:
        """All pieces."""
        for begin in range(0, self.length, self.piece):
            end = min(begin + self.piece, self.length)
            q, y = self.q[:, begin:end], self.y[:, begin:end]
            k, v = self.k[:, :end], self.v[:, :end]
            scores = torch.bmm(q, k.transpose(1, 2))
            torch.bmm(scores, v)
            torch.bmm(y, v.transpose(1, 2))
            torch.bmm(scores.transpose(1, 2), y)
            torch.bmm(scores, k)
            torch.bmm(scores.transpose(1, 2), q)


def products(setting: Setting, device: torch.device) -> list[Linear | Attention]:
    """What a micro batch multiplies, layer by layer, with buffers of its own."""
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    how = {"device": device, "dtype": dtype}
    tokens = setting.micro_batch * setting.seq_length
    hidden, inner = setting.hidden_size, setting.ffn_hidden_size
    width = hidden // setting.heads
    gated = setting.architecture == "llama"
    result: list[Linear | Attention] = []
    for _ in range(setting.layers):
        result += [
            Linear(tokens, hidden, hidden + 2 * setting.kv_heads * width, **how),
            Attention(setting.micro_batch * setting.heads, setting.seq_length, width, **how),
            Linear(tokens, hidden, hidden, **how),
            Linear(tokens, hidden, 2 * inner if gated else inner, **how),
            Linear(tokens, inner, hidden, **how),
        ]
    return [*result, Linear(tokens, hidden, setting.vocab_size, **how)]


@torch.no_grad()
def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Multiplies."""
    work = products(setting, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    while True:
        for _ in range(setting.micro_batches):
            for product in work:
                product()
        after_step(None)
