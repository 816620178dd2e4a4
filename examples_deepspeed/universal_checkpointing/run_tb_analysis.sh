#!/usr/bin/env bash
# Megatron-DeepSpeed's comparison of the runs: run_tb_analysis.sh [FOLDER] (z1_uni_ckpt). Writes a
# table for each, uc_out_tp2_pp2_dp2_sp1.csv ..., and uc_char_training_loss.png; val_uc_out_... and
# uc_char_validation_loss.png of the validation losses; all into the current folder.
set -euo pipefail
analysis=$(dirname "$0")/tb_analysis/tb_analysis_script.py
folder=${1:-z1_uni_ckpt}

python "$analysis" --tb_dir "$folder" --plot_name uc_char_training_loss.png \
    --plot_title "Universal checkpoints: training loss"
python "$analysis" --tb_dir "$folder" --tb_event_key "lm loss validation" --csv_name val_ \
    --plot_name uc_char_validation_loss.png --plot_title "Universal checkpoints: validation loss" \
    --plot_y_label "validation loss"
