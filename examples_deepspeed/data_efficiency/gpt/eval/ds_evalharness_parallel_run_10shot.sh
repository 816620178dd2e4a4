#!/usr/bin/env bash
# Evaluates checkpoints on 16 rows of tasks with ten examples each, a row on each GPU of this machine, and prints
# the average accuracy:
#
#     ds_evalharness_parallel_run_10shot.sh [CHECKPOINT ...] [FLAG ...]
#
# Settings, from the environment: CHECKPOINT_PATHS instead of arguments, CONFIG_PATH, RESULT_PATH (a
# folder), TASKS (rows, separated by spaces; the tasks of a row have one process), BATCH_SIZE (16),
# NUM_FEWSHOT (10), NUM_GPUS. The data of the tasks are files of this machine: --include_path FOLDER.
source "$(dirname "$0")/parallel.sh"

TASKS=${TASKS:-record triviaqa hellaswag arc_challenge arc_easy race multirc openbookqa lambada webqs
    winogrande piqa anli_r1,anli_r2 anli_r3 boolq,copa rte,wsc}
evaluate_rows 16 10 eval_results_10shot "$@"
