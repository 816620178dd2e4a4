#!/usr/bin/env bash
# BERT with 345 million weights on one GPU.
source "$(dirname "$0")/common.sh"

LAUNCHER=${LAUNCHER:-python} pretrain_bert 1 bert_345m "${wikipedia[@]}" "${wordpiece[@]}" "$@"
