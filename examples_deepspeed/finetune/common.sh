#!/usr/bin/env bash
# What the recipes of this folder share. Not run by itself:
#
#     source "$(dirname "$0")/common.sh"
#     finetune NAME --flag value ... "$@"
#
# The result is in $RUNS/NAME: a Hugging Face folder, report.html, checkpoints. The same command
# continues a run that was interrupted. Settings, next to those of ../common.sh (GPUS, LAUNCHER,
# HOSTFILE, RUNS, DRY_RUN):
#
#     BASE         folder of the downloaded model
#     DATA         files of examples, separated by spaces
#     EVAL_DATA    files of held-out examples (default: 5 % of DATA)

source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

finetune() { # NAME --flag value ...
    local paths held=()
    [[ -n ${BASE:-} ]] || fail "set BASE to the folder of a model, as downloaded from Hugging Face"
    [[ -n ${DATA:-} ]] || fail "set DATA to the files of examples"
    read -ra paths <<<"$DATA"
    if [[ -n ${EVAL_DATA:-} ]]; then
        read -ra held <<<"$EVAL_DATA"
        held=(--eval-data "${held[@]}")
    fi
    start finetune.py --model "$BASE" --data "${paths[@]}" "${held[@]}" \
        --output "${RUNS:-runs}/$1" "${@:2}"
}
