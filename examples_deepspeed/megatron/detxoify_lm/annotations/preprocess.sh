#!/usr/bin/env bash
# Megatron-LM's script: the texts of a file of JSON lines as PREFIX_text_document.bin and .idx.
#
#     preprocess.sh INPUT PREFIX [FLAG ...]
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../../megatron.sh"

(($# >= 2)) || fail "give INPUT PREFIX, such as samples.nontoxic.out samples.nontoxic"
FLAGS=()
tokenizer
run python tools/preprocess_data.py --input "$1" --output-prefix "$2" "${FLAGS[@]}" --append-eod \
    --workers 20 --chunk-size 25 "${@:3}"
