#!/usr/bin/env bash
# Megatron-DeepSpeed's comparison of the runs: run_tb_analysis_gpt.sh [FOLDER] (z1_uni_ckpt, here or in
# the checkout). Writes a table for each, uc_out_tp2_pp2_dp2_sp1.csv ..., and
# uc_char_training_loss.png; val_uc_out_... and uc_char_validation_loss.png of the validation losses;
# all into the current folder.
set -euo pipefail
examples=$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../..")
analysis=$examples/universal_checkpointing/tb_analysis/tb_analysis_script.py
folder=${1:-z1_uni_ckpt}
[[ -e $folder || $folder == /* ]] || folder=$examples/../$folder

python "$analysis" --tb_dir "$folder" --tb_event_key "lm-loss-training/lm loss" \
    --plot_name uc_char_training_loss.png --plot_title "Universal checkpoints: training loss"
python "$analysis" --tb_dir "$folder" --tb_event_key "lm-loss-validation/lm loss validation" \
    --csv_name val_ --plot_name uc_char_validation_loss.png \
    --plot_title "Universal checkpoints: validation loss" --plot_y_label "validation loss"
