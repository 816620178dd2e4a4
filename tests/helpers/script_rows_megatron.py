"""Rows of script_runs.py: scripts of Megatron-LM, universal checkpoints and others."""

from script_runs import MODEL, SMALL, TOKENS, Script

TEN = f"{SMALL} --train-iters 10 --lr-decay-iters 10"
T5 = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --kv-channels 8 --ffn-hidden-size 64 "
    "--encoder-seq-length 32 --decoder-seq-length 16 --max-position-embeddings 32 "
    "--global-batch-size 8 --micro-batch-size 2 --log-interval 1 --eval-iters 1 --train-iters 10 "
    "--lr-decay-iters 10"
)
WORDS = {"DATA_PATH": "{bert}", "VOCAB_FILE": "{wordpieces}"}
WARMUP = "--rampup-batch-size 4 4 8 --train-samples 72 --lr-decay-samples 60 --lr-warmup-samples 8"

PRETRAINING = tuple(
    Script(
        f"megatron/pretrain_{family}{suffix}.sh",
        *("train", processes),
        small=T5 if family == "t5" else TEN,
        settings=WORDS if family == "t5" else {},
        family="bert" if family == "bert" else "gpt",
        gpus=gpus if suffix.endswith("mp") and family != "t5" else min(gpus, 2),
    )
    for family in ("bert", "gpt", "t5")
    for suffix, processes, gpus in (
        ("", 1, 1),
        ("_distributed", 8, 2),
        ("_distributed_with_mp", 8, 4),
    )
)

TRAIN_GPT = (
    "CHECKPOINT_PATH={{out}}/trained LAUNCHER=python "
    "bash examples_deepspeed/megatron/pretrain_gpt.sh "
    "{sizes} --train-iters 2 --lr-decay-iters 2 --eval-iters 1"
)
GPT = TRAIN_GPT.format(sizes=f"{SMALL} --global-batch-size 2")
LONG = f"{MODEL} --seq-length 256 --max-position-embeddings 256"
LONG_GPT = TRAIN_GPT.format(sizes=f"{LONG} --micro-batch-size 2 --global-batch-size 2")
BERT = (
    "CHECKPOINT_PATH={out}/trained LAUNCHER=python "
    "bash examples_deepspeed/megatron/pretrain_bert.sh "
    f"{SMALL} --global-batch-size 2 --train-iters 2 --lr-decay-iters 2"
)
TRAINED = {"CHECKPOINT_PATH": "{out}/trained"}
FINE_TUNED = {"PRETRAINED_CHECKPOINT": "{out}/trained", "CHECKPOINT_PATH": "{out}/tuned"}
OVERALL = (r"overall: correct / total = .*%",)
RACE = "mkdir -p {out}/race; cp {source}/race/dev/middle/10[13]?.txt {out}/race"
FILES = {"TRAIN_DATA": "{out}/race", "VALID_DATA": "{out}/race"}
SELF = "megatron/detxoify_lm/self_generation/selfgenerate-1.3b-unconditional.sh"
PROMPTS = """echo '{{"prompt": {{"text": "They saw"}}}}' >{out}/prompts.jsonl"""

ICT = {"TEXT_DATA_PATH": "{bert}", "TITLE_DATA_PATH": "{titles}"}
ICT |= {"PRETRAINED_BERT_PATH": "{base}/trained"}
RETRIEVER = f"{MODEL} --max-position-embeddings 32 --retriever-seq-length 32 --micro-batch-size 4"
FILES_OF_QUESTIONS = (
    "python tests/helpers/retrieval_files.py {out}/files {data}/text.jsonl {wordpieces}"
)
RETRIEVER_LINE = (
    "CHECKPOINT_PATH={out}/ict TEXT_DATA_PATH={bert} TITLE_DATA_PATH={titles} "
    "PRETRAINED_BERT_PATH={out}/trained bash examples_deepspeed/megatron/pretrain_ict.sh "
    f"{RETRIEVER} --train-iters 1 --eval-iters 0"
)
DIALOGUES = {"WOW_DATA_FOLDER": "{out}/files", "WOI_DATA_FOLDER": "{out}/files"}
DIALOGUES |= {"MODEL_FILE": "{out}/files/dpr"}
DPR_NOTE = "its data sets are not distributed here; the encoder is a folder of transformers"
MSDP = (
    "WOW_DATA_FOLDER={out}/files WOI_DATA_FOLDER={out}/files bash examples_deepspeed/megatron/msdp/"
)
KNOWN = "cp {out}/files/output_testseen_knowledge_{{reference,generations}}.txt"
SAID = (
    "cp {out}/files/output_testseen_response_{{reference,generations}}.txt; "
    "cp {out}/files/output_testseen_{{response,knowledge}}_reference.txt"
)
ANSWERED = f"{KNOWN}; {MSDP}prep_resp_gen.sh"
SHOWN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 2048"
)
SHOWN_GPT = TRAIN_GPT.format(sizes=f"{SHOWN} --micro-batch-size 2 --global-batch-size 2")

TASKS = (
    Script(
        *("megatron/pretrain_gpt3_175B.sh", "train", 1024),
        small=f"{SMALL} {WARMUP} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        gpus=4,
        prints=("global batch size: +4 ", "global batch size: +8 "),
    ),
    *(
        Script(
            *(f"megatron/run_text_generation_server_345M{suffix}.sh", "serve", processes),
            small=f"{MODEL} --max-position-embeddings 32",
            before=(GPT,),
            settings=TRAINED,
            gpus=gpus,
            note=note,
        )
        for suffix, processes, gpus, note in (
            ("", 1, 1, ""),
            ("_8_tensor_parallel", 8, 2, "its slashes at the ends of lines were no continuation"),
        )
    ),
    Script(
        *("megatron/evaluate_zeroshot_gpt.sh", "run", 8),
        small=f"{LONG} --micro-batch-size 4",
        before=(LONG_GPT, "head -20 {source}/lambada/*.jsonl >{out}/lambada.jsonl"),
        settings=TRAINED | {"VALID_DATA": "{out}/lambada.jsonl"},
        prints=(r"number correct: .*accuracy: [\d.E+-]+",),
        note="`--micro-batch-size` instead of `--batch-size`, which Megatron-DeepSpeed refused",
    ),
    Script(
        *("megatron/finetune_mnli_distributed.sh", "run", 8),
        small=f"{SMALL} --epochs 1",
        before=(BERT,),
        settings=FINE_TUNED
        | {
            "TRAIN_DATA": "{data}/MNLI/train.tsv",
            "VALID_DATA": "{data}/MNLI/dev_matched.tsv",
        },
        family="bert",
        prints=OVERALL,
    ),
    Script(
        *("megatron/finetune_race_distributed.sh", "run", 8),
        small=f"{SMALL} --epochs 1 --global-batch-size 2 --micro-batch-size 1 --max-qa-length 12",
        before=(BERT, RACE),
        settings=FINE_TUNED | FILES,
        family="bert",
        prints=OVERALL,
    ),
    Script(
        *(SELF, "run", 1),
        words="3 {out}/trained 7",
        small="--out-seq-length 4 --genfile {out}/samples.out",
        before=(GPT,),
        prints=("3 texts",),
    ),
    Script(
        *("megatron/detxoify_lm/annotations/preprocess.sh", "run", 1),
        words="{data}/text.jsonl {out}/own",
        small="--workers 1",
        prints=(r"documents, [\d,]+ tokens",),
        note="its vocabulary was pt2-vocab.json, a slip",
    ),
    Script(
        *("megatron/detxoify_lm/finetune_gpt_distributed-1.3b.sh", "run", 16),
        words="{gpt} {out}/detoxified 1e-4 8 3 {out}/trained",
        small="--micro-batch-size 2 --eval-iters 1",
        before=(GPT,),
        settings={"DATA_BLEND": "{gpt}"},
        gpus=2,
        prints=(r"iteration +3/ +3", "validation loss at .*PPL"),
    ),
    Script(
        *("megatron/detxoify_lm/generate-1.3b.sh", "run", 1),
        words="{out}/prompts.jsonl {out}/trained",
        small="--out-seq-length 4",
        before=(GPT, PROMPTS),
        prints=("1 text",),
    ),
    Script(
        *("megatron/merge_mp_bert.sh", "run", 1),
        small=f"{MODEL} --max-position-embeddings 32",
        before=(BERT.replace("LAUNCHER=python", "GPUS=2") + " --tensor-model-parallel-size 2",),
        settings=TRAINED | {"MERGED_PATH": "{out}/merged"},
        family="bert",
        prints=("merged",),
        note="its program was missing; any layout loads any checkpoint",
    ),
    Script(
        *("megatron/pretrain_ict.sh", "train", 1),
        small=f"{TEN} --retriever-seq-length 32",
        before=(BERT.replace("{out}", "{base}"),),
        settings=ICT,
        family="bert",
    ),
    Script(
        *("megatron/finetune_retriever_distributed.sh", "run", 8),
        small=f"{RETRIEVER} --eval-interval 2 --eval-iters 1 --epochs 2",
        before=(BERT, FILES_OF_QUESTIONS),
        settings={"BERT_LOAD_PATH": "{out}/trained", "CHECKPOINT_PATH": "{out}/tuned"}
        | {"TRAIN_DATA": "{out}/files/nq.json", "VALID_DATA": "{out}/files/nq.json"},
        family="bert",
        gpus=2,
        prints=(r"overall: top1_accuracy = [\d.]+", r"average_rank = [\d.]+"),
        note="its data are files of DPR, not distributed here",
    ),
    Script(
        *("megatron/evaluate_retriever_nq.sh", "run", 1),
        small=RETRIEVER,
        before=(BERT, FILES_OF_QUESTIONS, RETRIEVER_LINE),
        settings={"CHECKPOINT_PATH": "{out}/ict", "EMBEDDING_PATH": "{out}/vectors"}
        | {"EVIDENCE_DATA_DIR": "{out}/files/evidence.tsv"}
        | {"QA_FILE": "{out}/files/questions.tsv"},
        family="bert",
        prints=(r"\d+ passages of \d+ elements", r"top-5: [\d.]+", r"top-20: [\d.]+"),
        note="the search is exact; faiss is not needed",
    ),
    *(
        Script(
            *(f"megatron/msdp/{name}.sh", "run", processes),
            small=f"{SHOWN} --out-seq-length 8" if "gen" in name and processes > 1 else "",
            before=(FILES_OF_QUESTIONS, *before),
            settings=DIALOGUES | settings,
            prints=(prints,),
            gpus=min(processes, 2),
            note=note,
        )
        for name, processes, before, settings, prints, note in (
            ("data_processing", 1, (), {}, "get_resp_gen_prompts: 20 lines", DPR_NOTE),
            ("prompt_knwl_gen", 8, (SHOWN_GPT,), TRAINED, "4 texts", ""),
            ("prep_resp_gen", 1, (KNOWN,), {}, "prepare_input: 4 lines", ""),
            (
                "prompt_resp_gen",
                8,
                (ANSWERED, SHOWN_GPT),
                TRAINED,
                "4 texts",
                "",
            ),
            ("eval_knwl_generation", 1, (KNOWN,), {}, "Precision: .*; f1: 1.0000", ""),
            ("eval_resp_generation", 1, (SAID,), {}, "Precision: .*; f1: 1.0000", ""),
        )
    ),
)

NAMES = {"MEGATRON_DATA": "{gpt}", "BPE_VOCAB_FILE": "{vocab}", "BPE_MERGE_FILE": "{merges}"}
SIZES = {"NLS": "4", "HS": "32", "NAH": "4", "MBS": "1", "GBS": "8"}
SC21_TEN = (
    "--seq-length 32 --max-position-embeddings 32 --train-iters 10 --lr-decay-iters 10 "
    "--log-interval 1 --eval-iters 1 --save {out}/saved --load {out}/saved"
)
BY_HAND = (
    f"{TEN} --data-path {{gpt}} --vocab-file {{vocab}} --merge-file {{merges}} --lr 1e-4 --fp16"
)


def sc21(name: str, processes: int, gpus: int, note: str = "", **settings: str) -> Script:
    return Script(
        *(f"megatron/sc21/run_{name}.sh", "train", processes),
        small=SC21_TEN,
        settings=NAMES | SIZES | settings,
        gpus=gpus,
        note=note,
    )


SC21 = (
    sc21("figure_11", 8, 1, TP="1", NLS="3"),
    sc21("figure_12", 96, 2, TP="1", PP="2", NLS="8"),
    sc21("figure_13", 64, 4, TP="2"),
    sc21("figure_14", 64, 4, ""),
    sc21("figure_15", 64, 2, ""),
    sc21("figure_16", 64, 2, TP="1", PP="2", MBS="2"),
    sc21("figure_17", 128, 2, TP="2", PP="1", ACTIVATION_RECOMPUTATION="NO"),
    sc21("figure_18", 96, 2, "scatter-gather has no effect here", TP="1", PP="2", NLS="8"),
    sc21("table_1", 32, 2, ""),
    Script(
        *("megatron/sc21/CONFIG.sh", "run", 1),
        small="--lr 1",
        settings=NAMES
        | SIZES
        | {"TP": "1", "PP": "1", "DDP": "local", "NNODES": "1", "JOB_NAME": "x"},
        prints=("--loss-scale 8192 --lr 1",),
        note="the flags of `run_*.sh`",
    ),
    *(
        Script(
            *(f"megatron/sc21/{name}.sh", "train", 1),
            small="--save {out}/saved --load {out}/saved",
            settings={"MEGATRON_PARAMS": BY_HAND},
            note=note,
        )
        for name, note in (
            ("SBATCH", "without slurm on this machine"),
            ("SRUN", "no image of 2020; `CONTAINER_IMAGE` names one"),
        )
    ),
)

PLACES = {"RUNS": "{out}", "DP": "2", "TP": "1", "PP": "1", "GLOBAL_BATCH": "8"}
FROM = {"LOAD_TP": "1", "LOAD_PP": "1", "LOAD_DP": "2"}
TO = {"RUNS": "{out}", "TP": "2", "PP": "1", "DP": "1", "GLOBAL_BATCH": "8"}
LLAMA = {"FFN_HIDDEN_SIZE": "64", "CHECKPOINT_PATH": "{out}/saved"}
SAVE = (
    "RUNS={{out}} DP=2 TP=1 PP=1 GLOBAL_BATCH=8 GPUS=2 NUM_GPUS=2 LAUNCHER=torchrun "
    "FFN_HIDDEN_SIZE=64 "
    f"bash examples_deepspeed/universal_checkpointing/{{script}} {SMALL} --train-iters 10 "
    "--save-interval 5 --eval-interval 5 --lr-warmup-iters 2"
)
UNIVERSAL = (
    "python -m deepspeed.checkpoint.ds_to_universal --input_folder {{out}}/{saved}/global_step5 "
    "--output_folder {{out}}/{saved}/global_step5_universal"
)


def universal(name: str, family: str, dtype: str, folder: str) -> tuple[Script, ...]:
    saved = f"z1_uni_ckpt/checkpoints/{family}/z1/{dtype}/tp1_pp1_dp2_sp1_toy"
    place = f"universal_checkpointing/{folder}"
    save = SAVE.format(script=f"{folder}/run_{name}.sh")
    own = {"FFN_HIDDEN_SIZE": "64"} if family == "llama" else {}
    return (
        Script(
            *(f"{place}/run_{name}.sh", "train", 8),
            small=f"{SMALL} --train-iters 10 --lr-warmup-iters 2",
            settings=PLACES | own,
            gpus=2,
            note="`--loss-scale 12.0` was its JSON's initial power, which stays"
            if family == "gpt2"
            else "",
        ),
        Script(
            *(f"{place}/run_universal_{name}.sh", "run", 4),
            small=f"{SMALL} --train-iters 10 --lr-warmup-iters 2",
            settings=TO | FROM | own,
            before=(save, UNIVERSAL.format(saved=saved)),
            gpus=2,
            prints=("global_step5_universal at iteration 5",),
            continues=5e-4,
            note="16 samples a step as before, where Megatron-DeepSpeed had 4"
            if name == "bf16"
            else "",
        ),
    )


ANALYSED = (r"lm loss of tp1_pp1_dp2_sp1: steps 1 to 10", r"lm loss validation of .*")
UNIVERSAL_ROWS = (
    *universal("bf16", "gpt2", "bf16", "megatron_gpt"),
    *universal("fp16", "gpt2", "fp16", "megatron_gpt"),
    *universal("llama_bf16", "llama", "bf16", "llama"),
    *(
        Script(
            *(f"universal_checkpointing/{folder}/run_tb_analysis_{name}.sh", "run", 1),
            words=words,
            small="",
            before=(SAVE.format(script=f"{folder}/run_{saved}.sh"), *more),
            prints=tuple(line.replace("lm loss", ".*lm loss") for line in ANALYSED)
            if not more
            else ("steps 1 to 10",),
            cwd="{out}",
            leaves=("uc_char_training_loss.png", "uc_char_validation_loss.png"),
        )
        for folder, name, saved, words, more in (
            ("megatron_gpt", "gpt", "bf16", "{out}/z1_uni_ckpt", ()),
            (
                *("megatron_gpt", "gpt_plot_only", "bf16", "{out}"),
                (
                    "cd {out} && bash $OLDPWD/examples_deepspeed/universal_checkpointing/"
                    "run_tb_analysis.sh {out}/z1_uni_ckpt && rm *.png",
                ),
            ),
            ("llama", "llama", "llama_bf16", "{out}/z1_uni_ckpt/tensorboard/llama", ()),
        )
    ),
)

BASE = (
    'cd tests && python -c "from pathlib import Path; from finetune_cases import save_base; '
    "save_base(Path('{out}/hf'))\""
)
ALPACA = {
    "HF_LLAMA_PATH": "{out}/hf",
    "DATASET_PATH": "{source}/sft/alpaca_en_demo.json",
    "MEGA_DS_LLAMA_PATH": "{out}/converted",
    "FINETUNED_PATH": "{out}/tuned",
    **{"TP": "1", "PP": "1", "NUM_LAYERS": "2", "HIDDEN_SIZE": "32", "FFN_HIDDEN_SIZE": "48"},
    **{"NUM_HEADS": "4", "SEQ_LENGTH": "256", "MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "4"},
}
STANFORD = " ".join(f"{name}={value}" for name, value in ALPACA.items()) + (
    " LAUNCHER=python bash examples_deepspeed/finetune_hf_llama/finetune_llama.sh"
)
LLAMAS = (
    *(
        Script(
            *(f"pretrain_llama{name}_distributed.sh", "train", 8),
            small=f"{TEN} --lr-warmup-iters 2",
            settings=LLAMA | {"TP": "1", "NUM_KV_HEADS": "2"},
            gpus=2,
        )
        for name in ("", "2")
    ),
    Script(
        *("generate_text.sh", "run", 1),
        small=f"{MODEL} --max-position-embeddings 32 --out-seq-length 4 "
        "--sample-input-file {out}/in.txt",
        before=(GPT, "echo They saw >{out}/in.txt"),
        settings=TRAINED | {"GENFILE": "{out}/samples.json"},
        prints=("1 text",),
        note="`tools/generate_samples_gpt.py`; with `NUM_SAMPLES=0` prompts are continued",
    ),
    Script(
        *("finetune_hf_llama/finetune_llama.sh", "run", 4),
        words="convert_mds2hf",
        small="--hf-ckpt-num-shards -1",
        before=(
            BASE,
            f"{STANFORD} convert_hf2mds --hf-ckpt-num-shards -1",
            f"{STANFORD} --train-iters 3 --lr-warmup-iters 1 --eval-iters 1 --lr-decay-iters 3",
        ),
        settings=ALPACA,
        prints=("hf-out",),
        note="converted, trained for 3 steps, converted back; steps are saved where it trains",
    ),
)

DROPPING = "2.0e-4 300 true 16 8 true 1 seqlen_truncate dummy dummy value single_cluster 8 32 8 8 1"
LTD = {"LTD_START": "16", "LTD_STEP": "8", "LTD_STEP_IN_MILLION": "8e-6"}
KEPT = (r"random ltd reserved length: +16 \| actual seqlen: +24 ",)
DEEPER = "--num-layers 4"
BERT_TOKENS = (
    "--train-tokens 2560 --lr-decay-tokens 2560 --lr-warmup-iters 2 --train-iters 20 "
    "--num-workers 0"
)
DATA_EFFICIENCY = (
    Script(
        *("data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_base_script.sh", "train", 8),
        words=DROPPING,
        small=f"{SMALL} {DEEPER} {TOKENS} --train-iters 10 --train-tokens 100000",
        prints=("curriculum seqlen: +(8|16) ", "reserved length: +16 .*actual seqlen: +24 "),
        note="layers drop tokens while the curriculum's length grows; no index paths",
    ),
    Script(
        *("data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_run.sh", "train", 8),
        words="ltd_150B",
        small=f"{SMALL} {DEEPER} {TOKENS} --train-iters 10 --train-tokens 100000",
        settings=LTD,
        prints=KEPT,
        note="a recipe is an argument; all were commented out",
    ),
    Script(
        *("data_efficiency/bert/pretrain/ds_pretrain_bert_336M_base_script.sh", "train", 8),
        words="1e-4 2 true 16 8e-6",
        small=f"{SMALL} {DEEPER} {BERT_TOKENS} --train-iters 10 --train-tokens 100000",
        family="bert",
        prints=KEPT,
        note="layers drop tokens; no index path",
    ),
    Script(
        *("data_efficiency/bert/pretrain/ds_pretrain_bert_336M_run.sh", "train", 8),
        words="ltd_524B",
        small=f"{SMALL} {DEEPER} {BERT_TOKENS} --train-iters 10 --train-tokens 100000",
        settings=LTD,
        prints=KEPT,
        family="bert",
        note="a recipe is an argument; all were commented out",
    ),
    Script(
        *("data_efficiency/gpt/eval/ds_evalharness_1gpu.sh", "run", 1),
        words="{out}/trained ds_config_eval_dummy.json {out}/results 0 "
        "lambada={source}/lambada/lambada_test_first1000.jsonl localhost 2 0",
        small="--limit 2",
        before=(LONG_GPT,),
        prints=(r"lambada.*acc\D+[\d.]+",),
    ),
    *(
        Script(
            *(f"data_efficiency/gpt/eval/ds_evalharness_parallel_run{suffix}.sh", "run", 1),
            words="{out}/trained",
            small="--limit 2",
            before=(LONG_GPT,),
            settings={
                "TASKS": "lambada={source}/lambada/lambada_test_first1000.jsonl",
                "RESULT_PATH": "{out}/results",
                "NUM_FEWSHOT": "0",
            },
            prints=(r"average accuracy of 1 tasks: [\d.]+",),
        )
        for suffix in ("", "_10shot")
    ),
    *(
        Script(
            *(f"data_efficiency/bert/finetune/ds_finetune_bert_{task}.sh", "run", 8),
            words="7",
            small=f"{SMALL} --epochs 1 {flags}",
            before=(BERT, RACE),
            settings={"PRETRAINED_CHECKPOINT": "{out}/trained"} | settings,
            family="bert",
            prints=OVERALL,
        )
        for task, flags, settings in (
            ("mnli", "", {"DATA_HOME": "{data}"}),
            ("qqp", "", {"DATA_HOME": "{data}"}),
            ("race", "--global-batch-size 2 --micro-batch-size 1 --max-qa-length 12", FILES),
        )
    ),
    Script(
        *("data_efficiency/bert/finetune_glue/ds_finetune_bert_glue.sh", "run", 1),
        words="localhost:0 29871 7 QQP 2e-5 {out}/trained",
        small=f"{SMALL} --epochs 1",
        before=(BERT,),
        settings={"DATA_HOME": "{data}"},
        family="bert",
        prints=OVERALL,
    ),
    Script(
        *("data_efficiency/bert/finetune_glue/ds_finetune_bert_glue_run.sh", "run", 1),
        words="localhost:0 29872 {out}/trained",
        small=f"{SMALL} --epochs 1",
        before=(BERT,),
        settings={"DATA_HOME": "{data}", "TASKS": "QQP", "SEEDS": "1 2", "LRS": "2e-5"},
        family="bert",
        prints=OVERALL,
    ),
)

ROWS = (*PRETRAINING, *TASKS, *SC21, *UNIVERSAL_ROWS, *LLAMAS, *DATA_EFFICIENCY)
