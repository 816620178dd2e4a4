"""Rows of script_runs.py: scripts of examples_deepspeed/ other than Megatron-LM's."""

from script_runs import SMALL, TOKENS, Script

GPT = f"{SMALL} {TOKENS}"
CHUNKS = "--ds-sequence-parallel-fpdt-chunk-size 16"
TEN = "--train-iters 10 --train-tokens 100000"
"""Where the tokens of a step grow."""
GROWING = {"CL_START_SEQLEN": "8", "CL_STEP": "8"}
TRAINED = (
    "OUTPUT_BASEPATH={out}/model CHECKPOINT_PATH={out}/trained LAUNCHER=torchrun "
    f"examples_deepspeed/MoE/ds_pretrain_gpt_350M_dense.sh {GPT}"
)
EVALUATED = {"CHECKPOINT_PATH": "{out}/trained", "RESULT_PATH": "{out}/results.json"}
LAMBADA = "{source}/lambada/lambada_test_first1000.jsonl"
WIKITEXT = "{source}/wikitext2/wiki.valid.raw"
SOONER = (
    'sed -e "s/\\(schedule_offset.: \\)50/\\13/" -e "s/.CONFIG_CL_ENABLED./false/" '
    '-e "s/.CONFIG_CL_[A-Z]*./64/" '
    "examples_deepspeed/compression/ds_config_gpt_TEMPLATE_compression.json "
    "> {out}/quantized.json"
)
"""A JSON whose quantization begins within ten steps."""
KD = {"CHECKPOINT_PATH_TEACHER": "{base}/trained"}


def tokens(path: str, processes: int, **more: object) -> Script:
    return Script(path, "train", processes, small=GPT, **more)


LAYERS = f"{GPT} --num-layers 4"
STUDENT = "--num-layers-teacher 4 --num-layers 2"
BALANCED = ("load_balancing_loss: ",)
TEACHER = (
    "OUTPUT_BASEPATH={{out}}/model CHECKPOINT_PATH={{out}}/trained LAUNCHER=torchrun "
    "EP_SIZE='2 4' examples_deepspeed/MoE/ds_pretrain_gpt_{name}.sh "
    f"{LAYERS}"
)
FEWER = "experts over the most processes that divide those of every layer; it was {}, refused now"
MOE = tuple(
    tokens(
        f"MoE/ds_pretrain_gpt_{name}.sh",
        64,
        settings={"EP_SIZE": "4"},
        gpus=2,
        prints=BALANCED,
    )
    for name in ("125M_MoE64", "350M_MoE128", "1.3B_MoE128")
)
MOE += tuple(
    Script(
        *(f"MoE/ds_pretrain_gpt_{name}.sh", "train", 64),
        small=LAYERS,
        settings={"EP_SIZE": "2 4"},
        gpus=2,
        prints=BALANCED,
        note=note,
    )
    for name, note in (
        ("350M_PR-MoE32or64", FEWER.format(64)),
        ("1.3B_PR-MoE64or128", ""),
    )
)
MOE += tuple(
    Script(
        *(f"MoE/ds_pretrain_gpt_{name}_MoS.sh", "train", processes),
        small=f"{GPT} {STUDENT}",
        settings={"EP_SIZE": "4", "EP_SIZE_TEACHER": "2 4"} | KD,
        gpus=2,
        before=(TEACHER.format(name=name),),
        prints=(*BALANCED, "kd loss: "),
        note=note,
    )
    for name, processes, note in (
        (
            "350M_PR-MoE32or64",
            64,
            f"its JSON was invalid, its teacher that of 1.3B; {FEWER}".format(64),
        ),
        ("1.3B_PR-MoE64or128", 128, FEWER.format(128)),
    )
)
MOE += (
    tokens("MoE/ds_pretrain_gpt_350M_dense.sh", 64, gpus=2),
    Script(
        *("MoE/ds_pretrain_gpt_1.3B_dense.sh", "train", 64),
        small=f"{GPT} --train-tokens 2048",
        settings={"MP_SIZE": "2", "RAMPUP_BATCH_SIZE": "4 4 16"},
        gpus=2,
        prints=("global batch size: +4 ", "global batch size: +8 "),
    ),
    Script(
        *("MoE/ds_pretrain_gpt_6.7B_dense.sh", "train", 64),
        small=f"{GPT} --train-tokens 2048",
        settings={"MP_SIZE": "2", "RAMPUP_BATCH_SIZE": "4 4 16"},
        gpus=2,
        prints=("global batch size: +4 ", "global batch size: +8 "),
    ),
    Script(
        *("MoE/ds_pretrain_gpt_125M_dense_cl.sh", "train", 128),
        small=f"{GPT} {TEN}",
        settings=GROWING,
        prints=("curriculum seqlen: +(8|16) ", "curriculum seqlen: +32 "),
    ),
    Script(
        *("MoE/ds_pretrain_gpt_1.3B_dense_cl.sh", "train", 128),
        small=f"{GPT} {TEN}",
        settings=GROWING | {"MP_SIZE": "2"},
        gpus=2,
        prints=("curriculum seqlen: +(8|16) ", "curriculum seqlen: +32 "),
    ),
    Script(
        *("MoE/ds_evalharness.sh", "run", 1),
        small="--limit 4 --micro-batch-size 2",
        before=("EP_SIZE=4 " + TRAINED.replace("350M_dense", "125M_MoE64"),),
        settings=EVALUATED | {"TASKS": f"lambada={LAMBADA}"},
        prints=(r"lambada.*acc\D+[\d.]+",),
        note="task data are local files",
    ),
)

COMPRESSION = (
    *(
        Script(
            *(f"compression/ds_pretrain_gpt_{name}.sh", "train", processes),
            small=f"{GPT} {TEN} --num-layers-teacher 2 --num-layers 1",
            settings=KD | {"MP_SIZE": str(tensor)} | (GROWING if "cl" in name else {}),
            gpus=tensor,
            before=(TRAINED,),
            prints=("kd loss: ", *(("curriculum seqlen: +(8|16) ",) if "cl" in name else ())),
        )
        for name, processes, tensor in (
            ("125M_dense_kd", 64, 1),
            ("125M_dense_cl_kd", 64, 1),
            ("1.3B_dense_cl_kd", 128, 2),
        )
    ),
    tokens(
        *("compression/ds_pretrain_gpt_350M_dense_kd.sh", 64),
        note="has no teacher in spite of its name",
    ),
    *(
        Script(
            *(f"compression/125M-{name}Int8-test-64gpu-distilled-group48.sh", "train", 64),
            small=f"{GPT} --hidden-size 48 --deepspeed_config {{base}}/quantized.json",
            settings={"LOAD_PATH": "{base}/trained"},
            before=(f"{TRAINED} --hidden-size 48", SOONER),
            prints=(
                "Weight quantization is enabled at step 3",
                "Activation quantization is enabled at step 3",
            ),
            note="4-bit weights and 8-bit activations in spite of its name; quantised from step 3 "
            "on instead of 50",
        )
        for name in ("", "L10-", "L12-")
    ),
    Script(
        *("compression/ds_evalharness.sh", "run", 1),
        small="--limit 4 --micro-batch-size 2",
        before=(TRAINED,),
        settings=EVALUATED | {"TASKS": f"lambada={LAMBADA},wikitext={WIKITEXT}"},
        prints=(r"lambada.*acc\D+[\d.]+", r"word_perplexity\D+[\d.]+"),
        note="task data are local files",
    ),
)

POSITIONS = (
    "baseline baseline 1558 1.5e-4 512 1024 1 1234 5000 600000 157286400000 157286400000 3000 "
    "false 0 0"
)
PIPELINE = {"MP_SIZE": "1", "PP_SIZE": "2"}
CURRICULUM = (
    Script(
        *("curriculum_learning/ds_train.sh", "train", 128),
        small=f"{SMALL} {TEN} --lr-warmup-iters 3",
        settings={"CURRICULUM_STEP": "8", "CURRICULUM_MIN": "8", "LR_DECAY_TOKEN": "2560"},
        prints=("curriculum seqlen: +(8|16) ", "curriculum seqlen: +32 "),
        note="`CONFIG=baseline` is the run that its comments had",
    ),
    Script(
        *("curriculum_learning/ds_pretrain_gpt2.sh", "train", 128),
        words=POSITIONS,
        small=f"{SMALL} {TEN} --lr-warmup-iters 3",
        gpus=2,
        note="16 positions, then flags",
    ),
)
SLW = tuple(
    Script(
        *(f"{folder}/ds_pretrain_gpt_1.3B_rope_slw.sh", "train", 64),
        small=f"{GPT} {TEN}",
        settings=PIPELINE | {"CL_START_SEQLEN": "8", "CL_STEP": "8"},
        gpus=2,
        prints=("curriculum seqlen: +(8|16) ", "curriculum seqlen: +32 "),
    )
    for folder in ("curriculum_learning", "rebase")
)
REBASE = (
    tokens("rebase/ds_pretrain_gpt_1.3B.sh", 64, gpus=2),
    tokens("rebase/ds_pretrain_gpt_1.3B_rope.sh", 64, settings=PIPELINE, gpus=2),
    tokens("rebase/ds_pretrain_gpt_1.3B_megatron_checkpointing.sh", 64, gpus=2),
    tokens("rebase/ds_pretrain_gpt_13B.sh", 64, settings=PIPELINE, gpus=2),
    tokens("rebase/ds_pretrain_gpt_125M.sh", 8, gpus=4),
    tokens(
        *("rebase/ds_pretrain_gpt_125M_flashattn.sh", 8),
        settings=PIPELINE,
        gpus=2,
        note="`--attention-backend` chooses the kernel",
    ),
)

BERT = f"{SMALL} --train-iters 10"
FINE_TUNED = {
    "mnli": {
        "TRAIN_DATA": "{data}/MNLI/train.tsv",
        "VALID_DATA": "{data}/MNLI/dev_matched.tsv {data}/MNLI/dev_mismatched.tsv",
    },
    "qqp": {"TRAIN_DATA": "{data}/QQP/train.tsv", "VALID_DATA": "{data}/QQP/dev.tsv"},
    "race": {"TRAIN_DATA": "{source}/race/dev/middle", "VALID_DATA": "{source}/race/dev/middle"},
}
PRETRAINED = (
    "OUTPUT_BASEPATH={out}/bert CHECKPOINT_PATH={out}/pretrained LAUNCHER=torchrun "
    f"examples_deepspeed/bert_with_pile/ds_pretrain_bert.sh {BERT}"
)
PILE = (
    Script(
        *("bert_with_pile/ds_pretrain_bert.sh", "train", 64),
        small=BERT,
        settings={"LR_WARMUP_ITERS": "2", "LR_DECAY_ITERS": "10"},
        family="bert",
        gpus=2,
    ),
    *(
        Script(
            *(f"bert_with_pile/ds_finetune_bert_{task}.sh", "run", 8),
            words="7",
            small=f"{SMALL} --epochs 1",
            settings=settings | {"PRETRAINED_CHECKPOINT": "{out}/pretrained"},
            family="bert",
            before=(PRETRAINED,),
            prints=(r"overall: .*= [\d.]+",),
        )
        for task, settings in FINE_TUNED.items()
    ),
)

SAVED = "--train-iters 10 --save {out}/saved --load {out}/saved --save-interval 10"
OTHERS = (
    Script(
        *("zero_bubble_pp/zbh1_pretrain_gpt_1.3b.sh", "train", 8),
        small=GPT,
        settings={"PP_SIZE": "2"},
        gpus=2,
        prints=(r"zbh1",),
        note="losses are those of 1F1B",
    ),
    Script(
        *("offload_pp/ds_pretrain_gpt_350M.sh", "train", 16),
        small=GPT.replace("2560", "2048"),
        settings={"RAMPUP_BATCH_SIZE": "4 4 16"},
        gpus=2,
        prints=(r"offload_optimizer.ratio 0.3: 1 of 2 sub-groups",),
        note="fp16, as its flags say; its JSON said bf16",
    ),
    *(
        Script(
            *(f"sequence_parallel/ds_pretrain_gpt_{name}.sh", "train", 8),
            small=f"{GPT} {more}",
            settings={"SP_SIZE": "2"},
            gpus=2,
            prints=(r"sequences divided over 2 \(a2a\)",),
            note=note,
        )
        for name, more, note in (
            ("1.3B_seq_parallel_32k", "", "Ulysses over 4 ranks, here over 2"),
            ("30B_seq_parallel_32k", "", "Ulysses over 4 ranks, here over 2"),
            ("6.7B_fpdt_32k", CHUNKS, "and chunks of attention in main memory, here of 16 tokens"),
        )
    ),
    *(
        Script(
            f"deepspeed4science/megatron_long_seq_support/pretrain_gpt_{name}_seq_parallel.sh",
            *("train", processes),
            small=GPT,
            settings={"MP_SIZE": "2"},
            gpus=2,
            prints=("Flops Profiler",),
            note="Megatron's `--sequence-parallel`",
        )
        for name, processes in (("1.3B", 8), ("30B", 32))
    ),
    *(
        Script(
            *(f"azure/{name}.sh", "train", processes),
            small=f"{SMALL} {SAVED} --lr 1e-3",
            gpus=2,
            note="`--loss-scale 15` was its JSON's initial power, which stays",
        )
        for name, processes in (("run-175b", 8), ("run-1t", 8), ("run-benchmark-model", 16))
    ),
    Script(
        *("run_deepspeed_example.sh", "train", 8),
        small=f"{SMALL} {SAVED} --lr 1e-3",
        gpus=2,
        note="its JSON's batch size of 64 was not that of its flags, 1024, which stays",
    ),
)

ANALYSED = {
    "SEQ_LEN": "64", "BATCH_SIZE": "16", "NUM_EPOCHS": "1", "NUM_THREADS": "1",
    "NUM_THREADS_REDUCE": "1", "SAVE_PATH": "{out}/analysis",
}  # fmt: skip
ANALYSIS = tuple(
    Script(
        *(f"data_efficiency/{family}/ds_analyze_{family}_data_{step}.sh", "run", 1),
        small="",
        settings=ANALYSED,
        family=family,
        before=()
        if step == "map"
        else (
            f"{' '.join(f'{name}={value}' for name, value in ANALYSED.items())} "
            f"examples_deepspeed/data_efficiency/{family}/ds_analyze_{family}_data_map.sh",
        ),
        prints=(said,),
    )
    for family in ("gpt", "bert")
    for step, said in (("map", r"[\d.]+ seconds"), ("reduce", "[0-9,]+ samples, [0-9,]+ tokens"))
)

ROWS = (
    *MOE,
    *COMPRESSION,
    *CURRICULUM,
    *SLW,
    *REBASE,
    *PILE,
    *OTHERS,
    *ANALYSIS,
)
