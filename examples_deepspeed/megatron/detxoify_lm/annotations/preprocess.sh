#!/usr/bin/env bash
# Megatron-LM's script: the texts of a file of JSON lines as PREFIX_text_document.bin and .idx.
#
#     preprocess.sh INPUT PREFIX [FLAG ...]
source "$(dirname "$(realpath "$0")")/../../megatron.sh"

(($# >= 2)) || fail "give INPUT PREFIX, such as samples.nontoxic.out samples.nontoxic"
FLAGS=()
tokenizer
run python tools/preprocess_data.py --input "$1" --output-prefix "$2" "${FLAGS[@]}" --append-eod \
    --workers 20 --chunk-size 25 "${@:3}"
