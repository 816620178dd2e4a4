#!/usr/bin/env bash
# Megatron-DeepSpeed's pictures again, from the tables of run_tb_analysis_gpt.sh:
# run_tb_analysis_gpt_plot_only.sh [FOLDER] (the current folder). Writes uc_char_training_loss.png and
# uc_char_validation_loss.png into the current folder.
set -euo pipefail
analysis=$(dirname "$(realpath "$0")")/../tb_analysis/tb_analysis_script.py
folder=${1:-.}

python "$analysis" --csv_dir "$folder" --plot_name uc_char_training_loss.png \
    --plot_title "Universal checkpoints: training loss"
python "$analysis" --csv_dir "$folder" --csv_name val_ \
    --plot_name uc_char_validation_loss.png \
    --plot_title "Universal checkpoints: validation loss" --plot_y_label "validation loss"
