"""Code of elementwise kernels for an H100, counted: instructions, loads, registers; no GPU needed.

    python benchmarks/kernel_instructions.py             the kernels of megatron/kernels
    python benchmarks/kernel_instructions.py --check     fails if one is bound by instructions
    python benchmarks/kernel_instructions.py --inductor  the same formulas by torch.compile

Triton compiles for compute capability 9.0 with its own ptxas; its cuobjdump lists what results. The
third needs a GPU, or the null GPU of tests/nullgpu, because Inductor asks for a device. It tries
two sizes of blocks, of which the one with fewer instructions is shown.

Instructions are those of the longest path through a program, per element that it writes. An H100
issues 132 x 128 of them in a cycle of about 1.6 GHz, which is 27 per ps; it copies 3.0 TB/s. A
kernel whose instructions take longer than its bytes is bound by instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.kernels import rope_triton, swiglu_triton
except ModuleNotFoundError:  # --help needs none, as the documentation asks for it
    triton = None

ISSUED, COPIED = 27.0, 3.0
"""Instructions of threads per ps, and bytes per ps, of an H100."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" if triton else Path()
LINE = re.compile(
    r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<when>@!?U?P\w+\s+)?(?P<code>[A-Z][A-Z0-9_.]*)"
    r"(?P<rest>[^;]*);",
    re.MULTILINE,
)
MODELS = {"1.5B": (8960, 12, 2), "3B": (11_008, 16, 2), "7B": (18_944, 28, 4)}
"""Inner width, heads and key heads of Qwen2.5."""
WIDTH = 128


@dataclass(frozen=True)
class Code:
    """A compiled kernel: instructions of its longest path, its loads and stores, registers, bytes
    of registers in memory, and threads of a program."""

    path: int
    moves: frozenset[str]
    registers: int
    spilled: int
    threads: int

    @classmethod
    def of(cls, binary: bytes, warps: int) -> Code:
        """Disassembles a cubin."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            listing = _listed("-sass", file.name)
            usage = _listed("-res-usage", file.name)
        numbers = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        lines = list(LINE.finditer(listing))
        moves = {line["code"] for line in lines if line["code"].startswith(("LDG", "STG"))}
        return cls(
            longest_path(lines),
            frozenset(moves),
            numbers["REG"],
            numbers["STACK"] + numbers["LOCAL"],
            32 * warps,
        )


def _listed(flag: str, name: str) -> str:
    done = subprocess.run(
        [TOOLS / "cuobjdump", flag, name], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def longest_path(lines: list[re.Match[str]]) -> int:
    """Return the number of instructions on the longest way from the first to an EXIT; loops are
    gone through once."""
    places = {int(line["at"], 16): number for number, line in enumerate(lines)}
    lengths = [0] * (len(lines) + 1)
    for number in reversed(range(len(lines))):
        line = lines[number]
        code, always = line["code"].split(".")[0], not line["when"]
        after = [] if code == "EXIT" and always else [lengths[number + 1]]
        if code == "BRA":
            target = places[int(line["rest"].split()[-1].strip("`()"), 16)]
            if target > number:
                after = [lengths[target], *([] if always else after)]
        if code == "BRA" and always and target <= number:
            lengths[number] = 0  # the loop that ends a listing
            continue
        lengths[number] = 1 + max(after, default=0)
    return lengths[0]


@dataclass(frozen=True)
class Row:
    """A kernel of a model, elements that a program writes, bytes that it moves for each."""

    name: str
    model: str
    code: Code
    elements: int
    bytes: float

    @property
    def instructions(self) -> float:
        """For each element."""
        return self.code.path * self.code.threads / self.elements

    @property
    def bound(self) -> str:
        """The slower of the two."""
        return "memory" if self.instructions / ISSUED < self.bytes / COPIED else "instructions"

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        return [
            self.name,
            self.model,
            f"{self.instructions:.1f}",
            f"{self.bytes:g}",
            f"{self.instructions / ISSUED:.2f} / {self.bytes / COPIED:.2f}",
            self.bound,
            ", ".join(sorted(self.code.moves)),
            str(self.code.registers),
            str(self.code.spilled),
        ]


COLUMNS = (
    "kernel", "model", "instructions", "bytes", "ps of instructions / bytes", "bound by",
    "loads and stores", "registers", "spilled",
)  # fmt: skip


def compiled(kernel: Any, types: dict[str, str], options: dict[str, Any], warps: int) -> Code:
    """The code of a kernel for pointers that are aligned to 16 bytes, and numbers that are
    multiples of 16 where a type ends in ``*16``."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in options:
            signature[name], constants[(place,)] = "constexpr", options[name]
            continue
        kind = types.get(name, "i32*16")
        signature[name] = kind.removesuffix("*16")
        if kind.startswith("*") or kind.endswith("*16"):
            hints[(place,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    return Code.of(built.asm["cubin"], warps)


def gates(model: str, kind: str, largest: bool) -> Iterator[Row]:
    """Both directions of a gated activation; elements are those that are written."""
    names = "x", "y", "grad", "result"
    types = {name: "*bf16" for name in names} | {"largest": "*fp32"}
    types |= {"clamp": "fp32", "offset": "fp32"}
    block = swiglu_triton.BLOCK
    options = {
        "KIND": kind, "CLAMPED": False, "OFFSET": False, "LARGEST": largest, "BLOCK": block,
    }  # fmt: skip
    ending = ", magnitude" if largest else ""
    for name, kernel, written, moved in (
        ("", swiglu_triton._forward, 1, 6),
        (" backward", swiglu_triton._backward, 2, 10),
    ):
        code = compiled(kernel, types, options, swiglu_triton.WARPS)
        yield Row(f"{kind}{name}{ending}", model, code, written * block, moved / written)


def rotations(model: str, interleaved: bool, largest: bool) -> Iterator[Row]:
    """Both directions of RoPE in the projection's rows. Angles are read from the cache: a table is
    small, and shared by all heads."""
    _, queries, keys = MODELS[model]
    types = {name: "*bf16" for name in ("q", "k", "v", "gate", "target")}
    types |= {name: "*fp32" for name in ("cos", "sin", "largest")}
    types |= {name: "i32" for name in ("q_blocks", "k_blocks")}
    half = WIDTH // 2
    for back in (False, True):
        if largest and not back:
            continue
        options = {
            "HEADS": queries, "KV_HEADS": keys, "DIM": WIDTH, "HALF": half, "GATED": False,
            "ROWS": rope_triton.PAIRS // half, "BACK": back, "INTERLEAVED": interleaved,
            "COPIED": back, "LARGEST": largest,
        }  # fmt: skip
        name = "rope backward, pack" if back else "rope, in place"
        name += ", interleaved" * interleaved + ", magnitude" * largest
        code = compiled(rope_triton._pack, types, options, rope_triton.WARPS)
        yield Row(name, model, code, 2 * rope_triton.PAIRS, 4)


def ours() -> Iterator[Row]:
    """The kernels of megatron/kernels."""
    for largest in (False, True):
        yield from gates("all", "swiglu", largest)
    for kind in ("geglu", "geglu_erf", "quick_geglu", "squared_reglu"):
        yield from gates("all", kind, False)
    for model in MODELS:
        yield from rotations(model, False, False)
    yield from rotations("3B", False, True)
    yield from rotations("3B", True, False)


def of_inductor() -> Iterator[Row]:
    """Code that torch.compile makes of the formulas without operators."""
    import torch.nn.functional as F

    from megatron.model.rope import apply_rope

    def gate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return F.silu(left) * right

    length = 256
    for model, (inner, queries, keys) in MODELS.items():
        x = torch.zeros(1, length, 2 * inner, device="cuda", dtype=torch.bfloat16)
        grads = [torch.zeros_like(x[..., :inner])]
        forward, backward = _code_of(gate, x, grads)
        yield Row("swiglu", model, *forward[0], 6)
        yield Row("swiglu backward", model, *backward[0], 5)
        heads = queries, keys, keys
        cos, sin = torch.zeros(2, length, 1, WIDTH, device="cuda")

        def turn(
            packed: Tensor,
            cos: Tensor = cos,
            sin: Tensor = sin,
            heads: tuple[int, ...] = heads,
        ) -> list[Tensor]:
            parts = packed.split([count * WIDTH for count in heads], -1)
            q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in parts)
            return [
                x.transpose(1, 2) for x in (apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
            ]

        x = torch.zeros(1, length, sum(heads) * WIDTH, device="cuda", dtype=torch.bfloat16)
        grads = [
            torch.zeros(1, length, count, WIDTH, device="cuda", dtype=x.dtype).transpose(1, 2)
            for count in heads
        ]
        forward, backward = _code_of(turn, x, grads)
        yield Row("rope of queries", model, *max(forward, key=lambda each: each[0].path), 4)
        yield Row("rope backward, cat", model, *backward[0], 4)


Built = list[tuple[Code, int]]


def _code_of(
    function: Callable[[Tensor], Any], x: Tensor, grads: list[Tensor]
) -> tuple[Built, ...]:
    """Kernels of a compiled function, forwards and backwards, each with the elements that a program
    writes: by name those of the size with the fewest instructions for each."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    results: list[Built] = []
    torch._dynamo.reset()
    known = set(folder.rglob("*.cubin"))
    outputs = torch.compile(function, dynamic=False)(x.requires_grad_())
    results.append(_built(folder, known))
    known = set(folder.rglob("*.cubin"))
    torch.autograd.backward(outputs, grads)
    results.append(_built(folder, known))
    return tuple(results)


def _built(folder: Path, known: set[Path]) -> Built:
    best: dict[str, tuple[Code, int]] = {}
    for path in sorted(set(folder.rglob("*.cubin")) - known):
        warps = json.loads(path.with_suffix(".json").read_text())["num_warps"]
        block = max(map(int, re.findall(r"tensor<(\d+)x", path.with_suffix(".ttir").read_text())))
        code = Code.of(path.read_bytes(), warps)
        before = best.get(path.stem)
        if before is None or code.path * code.threads / block < (
            before[0].path * before[0].threads / before[1]
        ):
            best[path.stem] = code, block
    return sorted(best.values(), key=lambda each: -each[0].path)


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--inductor", action="store_true", help="what torch.compile makes")
    parser.add_argument("--check", action="store_true", help="fail if one is bound by instructions")
    args = parser.parse_args(argv)
    if triton is None:
        parser.error("needs the package triton, which comes with a CUDA build of torch")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows = list(of_inductor() if args.inductor else ours())
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
    wrong = [
        row.name
        for row in rows
        if row.bound != "memory"
        or row.code.spilled
        or any(move.startswith(("LDG.E.U16", "STG.E.U16", "LDG.E.EL")) for move in row.code.moves)
        or not {"LDG.E.128", "STG.E.128"} <= row.code.moves
    ]
    if args.check and wrong:
        raise SystemExit(f"bound by instructions, narrow loads or registers in memory: {wrong}")


if __name__ == "__main__":
    main()
