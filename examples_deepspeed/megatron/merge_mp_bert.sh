#!/usr/bin/env bash
# Megatron-LM's script: a BERT of 345 million weights with TENSOR_MODEL_PARALLEL_SIZE (2) parts,
# CHECKPOINT_PATH, as one checkpoint of a single part, CHECKPOINT_PATH_merged (MERGED_PATH). Its
# program, tools/merge_mp_partitions.py, was missing in Megatron-DeepSpeed. For this trainer it is not
# needed: --load reads a checkpoint in any layout.
source "$(dirname "$0")/megatron.sh"

checkpoint=${CHECKPOINT_PATH:-checkpoints/bert_345m} LAUNCHER=${LAUNCHER:-python}
FLAGS=()
vocabulary bert
# shellcheck disable=SC2086
start tools/merge_mp_partitions.py --model-type BERT --tensor-model-parallel-size \
    "${TENSOR_MODEL_PARALLEL_SIZE:-2}" --tokenizer-type BertWordPieceLowerCase "${FLAGS[@]}" \
    ${MODEL[bert-345m]} --load "$checkpoint" "$@"
