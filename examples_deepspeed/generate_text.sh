#!/usr/bin/env bash
# Megatron-DeepSpeed's script: text by a GPT of 345 million weights, CHECKPOINT_PATH, after each line
# of the input; NUM_SAMPLES=5 writes five texts without a prompt to unconditional_samples.json
# (GENFILE) instead. mp, gpus and nodes are 1. MEGATRON_DEEPSPEED_PATH/dataset has checkpoints/gpt2_345m,
# gpt2-vocab.json and gpt2-merges.txt where CHECKPOINT_PATH, VOCAB_FILE and MERGE_FILE are not set.
source "$(dirname "$0")/common.sh"

dataset=${MEGATRON_DEEPSPEED_PATH:-.}/dataset FLAGS=()
VOCAB_FILE=${VOCAB_FILE:-$dataset/gpt2-vocab.json} MERGE_FILE=${MERGE_FILE:-$dataset/gpt2-merges.txt}
GPUS=${GPUS:-${gpus:-1}}
vocabulary gpt
# Launchers do not let the processes that they start read the terminal.
[[ ! -t 0 || -n ${DRY_RUN:-} ]] || exec < <(cat)
# shellcheck disable=SC2086
start tools/generate_samples_gpt.py --tensor-model-parallel-size "${mp:-1}" \
    --pipeline-model-parallel-size 1 ${MODEL[gpt2-345m]} --tokenizer-type GPT2BPETokenizer --fp16 \
    --num-experts "${experts:-1}" --mlp-type standard --micro-batch-size "${b:-1}" \
    --out-seq-length "${OUT_SEQ_LENGTH:-50}" --temperature 1.0 "${FLAGS[@]}" \
    --genfile "${GENFILE:-unconditional_samples.json}" --top_p 0.9 --log-interval 1 \
    --num-samples "${NUM_SAMPLES:-0}" --load "${CHECKPOINT_PATH:-$dataset/checkpoints/gpt2_345m}" "$@"
