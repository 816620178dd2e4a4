#!/usr/bin/env bash
# Settings and functions of the scripts of this folder. Not run by itself:
#
#     source "$(dirname "$0")/megatron.sh"
#     text_generation_server PROCESSES --flag value ... "$@"
#     retriever PROCESSES PROGRAM --flag value ... "$@"
#
# Settings, from the environment, next to those of ../common.sh: Megatron-LM's names GPUS_PER_NODE
# (of GPUS) and NNODES (of NODES).
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

GPUS=${GPUS:-${GPUS_PER_NODE:-}}
NODES=${NODES:-${NNODES:-1}}

# Serves GPT of 345 million weights at port 5000; each layer's matrices are shared among the
# processes. CHECKPOINT, or CHECKPOINT_PATH, is the folder of the checkpoint.
text_generation_server() { # PROCESSES --flag value ...
    local GPUS=${GPUS:-$1} LAUNCHER=${LAUNCHER:-torchrun} FLAGS=()
    local checkpoint=${CHECKPOINT:-${CHECKPOINT_PATH:-}}
    vocabulary gpt
    [[ -n $checkpoint ]] || fail "set CHECKPOINT to the folder of the checkpoint"
    # shellcheck disable=SC2086
    start tools/run_text_generation_server.py --tensor-model-parallel-size "$GPUS" \
        --pipeline-model-parallel-size 1 ${MODEL[gpt2-345m]} --load "$checkpoint" "${FLAGS[@]}" \
        --tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 1 --out-seq-length 1024 \
        --temperature 1.0 --top_p 0.9 --seed 42 "${@:2}"
}

# Flags of the retriever's scripts: two BERTs of 110 million weights.
BIENCODER="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 512
    --tensor-model-parallel-size 1 --tokenizer-type BertWordPieceLowerCase
    --retriever-seq-length 256 --fp16"

# A script of the retriever.
retriever() { # PROCESSES PROGRAM --flag value ...
    local GPUS=${GPUS:-$1} LAUNCHER=${LAUNCHER:-python}
    # shellcheck disable=SC2086
    start "$2" $BIENCODER --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" "${@:3}"
}
