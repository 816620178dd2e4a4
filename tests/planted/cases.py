"""Runs of small models in which the symbolic check looks for a planted bug, by axis.

    python tests/planted/cases.py tensor expert

checks the runs of some axes, by default all, and exits with 1 at the first fault.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

GPT = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --lr 1e-2 --weight-decay 0.1 --train-iters 4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 99"
)
LLAMA = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
MOE = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --qk-layernorm"
)
LATENT = (
    f"{LLAMA} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
DELTA = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 "
    "--linear-value-head-dim 6"
)
BERT = f"{GPT} --model-family bert"
T5 = (
    f"{GPT} --model-family t5 --decoder-num-layers 4 --decoder-seq-length 8 "
    "--position-embedding-type relative --normalization RMSNorm --disable-bias-linear"
)
TP, PP, CP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
EP, SP, ZERO = "--expert-model-parallel-size", "--sequence-parallel", "--zero-stage"
SCHEDULE, CHUNKS = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"

CASES: dict[str, list[tuple[int, str]]] = {
    "data": [
        (2, GPT),
        (4, f"{GPT} {TP} 2"),
        (3, f"{GPT} {ZERO} 1"),
        (4, f"{GPT} {TP} 2 {SP} {ZERO} 2"),
        (3, f"{GPT} {ZERO} 3"),
    ],
    "zero": [
        (3, f"{GPT} {ZERO} 1"),
        (4, f"{GPT} {TP} 2 {SP} {ZERO} 2"),
        (3, f"{GPT} {ZERO} 3"),
        (4, f"{GPT} {PP} 2 {SCHEDULE} dualpipev {ZERO} 1"),
        (2, f"{GPT} {MOE} {EP} 2 {ZERO} 1"),
    ],
    "tensor": [
        (4, f"{GPT} {TP} 4"),
        (4, f"{GPT} {LLAMA} --num-query-groups 2 {TP} 4 {ZERO} 1"),
        (2, f"{T5} {TP} 2"),
    ],
    "sequence": [
        (4, f"{GPT} {TP} 2 {SP} {ZERO} 1"),
        (4, f"{GPT} {LLAMA} --num-query-groups 2 --qk-layernorm {TP} 4 {SP}"),
        (2, f"{BERT} {TP} 2 {SP}"),
    ],
    "pipeline": [
        (4, f"{GPT} {TP} 2 {PP} 2"),
        (2, f"{GPT} {PP} 2 {SCHEDULE} interleaved {CHUNKS} 2"),
        (4, f"{GPT} {PP} 4 {SCHEDULE} zbh1"),
        (2, f"{GPT} {PP} 2 {SCHEDULE} dualpipev"),
        (2, f"{GPT} {PP} 2 {SCHEDULE} dualpipev_zb"),
        (4, f"{GPT} {PP} 2 {SCHEDULE} interleaved {CHUNKS} 2 {ZERO} 1"),
        (2, f"{T5} {PP} 2"),
    ],
    "tied": [
        (4, f"{GPT} {PP} 2 {ZERO} 2"),
        (4, f"{GPT} {PP} 2 {TP} 2"),
        (4, f"{GPT} {PP} 2"),
        (2, f"{T5} {PP} 2"),
        (2, f"{GPT} --lm-head-bias {PP} 2"),
    ],
    "context": [
        (2, f"{GPT} {CP} 2"),
        (4, f"{GPT} {LLAMA} --num-query-groups 2 {TP} 2 {SP} {CP} 2 --cp-comm-type a2a"),
        (4, f"{GPT} {LLAMA} {CP} 4 --cp-comm-type p2p"),
        (2, f"{GPT} {LLAMA} --num-query-groups 2 {CP} 2 --cp-comm-type allgather"),
        (4, f"{GPT} {CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
        (2, f"{GPT} {MOE} {CP} 2"),
        (2, f"{BERT} {CP} 2"),
        (2, f"{GPT} {MOE} --moe-expert-capacity-factor 1.0 {CP} 2"),
        (2, f"{GPT} {DELTA} {CP} 2"),
    ],
    "expert": [
        (4, f"{GPT} {MOE} {EP} 2 {ZERO} 1"),
        (4, f"{GPT} {MOE} {EP} 2 {TP} 2 {SP}"),
        (4, f"{GPT} {MOE} {EP} 4 {TP} 2 {SP} --expert-tensor-parallel-size 1"),
        (4, f"{GPT} {MOE} {EP} 2 {TP} 2 --expert-tensor-parallel-size 1 {PP} 2"),
        (2, f"{GPT} {MOE} {TP} 2 --expert-tensor-parallel-size 1"),
        (2, f"{GPT} {MOE} {TP} 2"),
        (2, f"{GPT} {LATENT} {TP} 2"),
        (2, f"{GPT} {LATENT} {TP} 2 {SP}"),
        (4, f"{GPT} {LATENT} {EP} 2 {PP} 2"),
    ],
}  # fmt: skip
"""(processes, flags of pretrain_gpt.py) of each axis."""


def checked(ranks: int, words: str) -> str | None:
    """The first fault of a run, None without one."""
    from megatron.apps.parity.symbolic.check import check_run
    from megatron.run.run import flag_parser

    data = _replicas(ranks, words)
    batch = ["--global-batch-size", str(4 * data), "--micro-batch-size", "1"]
    with contextlib.redirect_stdout(io.StringIO()):
        settings = flag_parser(None, frozenset()).settings([*words.split(), *batch])
        return check_run(settings, ranks).fault


def faults(axes: list[str]) -> Iterator[tuple[int, str, str]]:
    """(processes, flags, first difference) of the runs that the check finds wrong."""
    for axis in axes:
        for ranks, words in CASES[axis]:
            try:
                fault = checked(ranks, words)
            except Exception as error:  # whatever a planted bug raises is found by it
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                yield ranks, words, fault


def _replicas(ranks: int, words: str) -> int:
    values = words.split()
    sizes = {flag: int(values[values.index(flag) + 1]) for flag in (TP, PP, CP) if flag in values}
    for size in sizes.values():
        ranks //= size
    return ranks


def main(axes: list[str]) -> int:
    for ranks, words, fault in faults(axes or list(CASES)):
        print(f"{ranks} ranks, {words}\n  {fault}")
        return 1
    print("no fault")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(sys.argv[1:]))
