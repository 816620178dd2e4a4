#!/usr/bin/env bash
# Reads prompts until "stop", and continues each with the model of CHECKPOINT_PATH. Settings, from
# the environment: MPSIZE, processes that share each layer's matrices; TEMP, TOPK and TOPP, how
# tokens are drawn (of TOPK and TOPP, 0 draws among all tokens).
source "$(dirname "$0")/../examples_deepspeed/common.sh"

MPSIZE=${MPSIZE:-1} LAUNCH=(python)
if ((MPSIZE > 1)); then
    GPUS=$MPSIZE LAUNCHER=${LAUNCHER:-torchrun} launcher
    # Launchers do not let the processes that they start read the terminal.
    [[ ! -t 0 ]] || exec < <(cat)
fi
run "${LAUNCH[@]}" tools/generate.py --load "${CHECKPOINT_PATH:-checkpoints/gpt2_345m}" \
    --model-parallel-size "$MPSIZE" --temperature "${TEMP:-0.9}" --top_k "${TOPK:-0}" \
    --top_p "${TOPP:-0}" --max-new-tokens 256 "$@"
