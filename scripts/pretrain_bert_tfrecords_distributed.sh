#!/usr/bin/env bash
# BERT on files of google-research/bert's create_pretraining_data.py, which TRAIN_DATA, VALID_DATA and
# TEST_DATA name (a path, or a pattern in quotes).
source "$(dirname "$0")/common.sh"

[[ -n ${TRAIN_DATA:-} && -n ${VALID_DATA:-} && -n ${TEST_DATA:-} ]] ||
    fail "set TRAIN_DATA, VALID_DATA and TEST_DATA to TFRecord files"
pretrain_bert 8 bert_345m --use-tfrecords --train-data "$TRAIN_DATA" --valid-data "$VALID_DATA" \
    --test-data "$TEST_DATA" "${wordpiece[@]}" "$@"
