#!/usr/bin/env bash
# Megatron-LM's script: serves GPT of 345 million weights at http://localhost:5000, from one process.
# GPUS=8 shares each layer's matrices among 8 processes, as its ..._345M_8_tensor_parallel.sh does.
# CHECKPOINT, or CHECKPOINT_PATH, is the folder of the checkpoint.
source "$(dirname "$0")/common.sh"

FLAGS=()
vocabulary gpt
CHECKPOINT=${CHECKPOINT:-${CHECKPOINT_PATH:-}}
[[ -n $CHECKPOINT ]] || fail "set CHECKPOINT to the folder of the checkpoint"
GPUS=${GPUS:-1} LAUNCHER=${LAUNCHER:-torchrun}
# shellcheck disable=SC2086
start tools/run_text_generation_server.py --tensor-model-parallel-size "$GPUS" \
    --pipeline-model-parallel-size 1 ${MODEL[gpt2-345m]} --load "$CHECKPOINT" "${FLAGS[@]}" \
    --tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 1 --out-seq-length 1024 \
    --temperature 1.0 --top_p 0.9 --seed 42 "$@"
