"""finetune.py as a whole: from one Hugging Face folder to another, in every layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from finetune_cases import QUICK, metrics, save_base, save_data, tune
from samples import sampled

from megatron.checkpoint.source import open_checkpoint

pytest.importorskip("transformers")

KINDS = {
    "sft": [],
    "packed": ["--packing"],
    "lora": ["--lora", "--lora-rank", "4"],
    "dpo": ["--preference", "dpo"],
    "dpo-lora": ["--preference", "dpo", "--lora"],
}
LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-zero1": (2, "--zero-stage 1"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tuning")
    return {"base": str(save_base(folder / "base")), **save_data(folder)}


def flags(files: dict[str, str], kind: str, output: Path, *more: str) -> list[str]:
    data = files["dpo" if kind.startswith("dpo") else "sft"]
    return [
        *("--model", files["base"], "--data", data, "--output", str(output)),
        *QUICK, *KINDS[kind], *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(files, pool, tmp_path_factory):
    """The results of fine-tunings on one process, each made once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            output = tmp_path_factory.mktemp(kind) / "tuned"
            pool.run(1, tune, flags(files, kind, output))
            made[kind] = output
        return made[kind]

    return of


def opened(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def test_transformers_answers_as_the_model_in_training(tuned, files):
    """By the exported template, until the exported end tokens."""
    output = tuned("sft")
    model, tokenizer = opened(output)
    texts = metrics(output, "text")[-2:]
    instructions = {row["instruction"] for row in json.loads(Path(files["sft"]).read_text())}
    for text in texts:
        (asked,) = [i for i in instructions if f"\n{i}\n" in text["prompt"]]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        assert tokenizer.decode(prompt["input_ids"][0]) == text["prompt"]
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
        new = answer[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text["answer"]


def test_held_out_loss_falls_and_everything_is_there(tuned):
    output = tuned("sft")
    losses = [row["lm loss"] if "lm loss" in row else row["loss"] for row in rows_of(output)]
    assert [row["iteration"] for row in rows_of(output)] == [0, 3, 6]
    assert losses[0] > losses[1] > losses[2]
    assert [row["iteration"] for row in metrics(output, "text")] == [0, 0, 3, 3, 6, 6]
    card = (output / "README.md").read_text()
    assert f"| {losses[0]:.4f} | {losses[2]:.4f} |" in card
    assert "<svg" in (output / "report.html").read_text()
    assert (output / "chat_template.jinja").is_file()
    # The run's own checkpoints end an answer where the exported model does.
    exported = json.loads((output / "generation_config.json").read_text())
    newest = open_checkpoint(output / "checkpoints").folder
    own = json.loads((newest / "tokenizer" / "generation_config.json").read_text())
    assert own["eos_token_id"] == exported["eos_token_id"] == opened(output)[1].eos_token_id


def rows_of(output: Path) -> list[dict]:
    return metrics(output, "validation")


@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: kind == "dpo-lora"))
def test_a_stopped_run_continues_bitwise(files, tuned, pool, tmp_path, kind):
    output = tmp_path / "tuned"
    argv = flags(files, kind, output)
    pool.run(1, tune, [*argv, "--exit-interval", "2"])
    assert not (output / "model.safetensors").exists()
    pool.run(1, tune, argv)
    whole = tuned(kind)
    for name in ("model.safetensors", *(["adapter/adapter_model.safetensors"] * ("lora" in kind))):
        assert (output / name).read_bytes() == (whole / name).read_bytes()
    assert metrics(output, "text") == metrics(whole, "text")


def other_weights(base: str, folder: Path) -> str:
    """A copy of a model with other weights of the same shapes."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_folder_is_of_one_base_and_data(files, tuned, pool, tmp_path):
    """A finished one, too, in which nothing then changes; other places of the same files are the
    same."""
    output = tmp_path / "tuned"
    shutil.copytree(tuned("sft"), output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    other, rows = other_weights(files["base"], tmp_path / "other"), tmp_path / "rows.json"
    rows.write_text(Path(files["sft"]).read_text().replace("say red", "say any red"))
    for more, message in (
        (["--model", other], f"was made from --model {files['base']}, and --model {other} has"),
        (["--data", str(rows)], rf"data: {rows} \(before: {files['sft']}\): bytes was"),
        (["--lora"], "--lora was False and is True"),
    ):
        with pytest.raises(Exception, match=message):
            pool.run(1, tune, flags(files, "sft", output, *more))
    shutil.copytree(files["base"], tmp_path / "moved")
    shutil.copyfile(files["sft"], tmp_path / "same.json")
    same = ["--model", str(tmp_path / "moved"), "--data", str(tmp_path / "same.json")]
    pool.run(1, tune, flags(files, "sft", output, *same, "--lr", "1"))
    after = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.proof
def test_the_card_says_what_was_done(files, pool, tmp_path):
    """Both parts of a resumed run; and where only the export is left, what the checkpoint says."""
    output = tmp_path / "tuned"
    argv = flags(files, "sft", output, "--keep-best", "--keep-last", "9", "--eval-interval", "2")
    pool.run(1, tune, [*argv, "--exit-interval", "2"])
    pool.run(1, tune, [*argv, "--lr", "1e-3", "--clip-grad", "0"])
    card = (output / "README.md").read_text()
    assert "| Learning rate | 0.001, cosine |" in card and "| Length | 6 steps of 4" in card
    assert "| Changed after step 2 | --lr was 0.003 and is 0.001; --clip-grad was 1.0" in card
    path = output / "checkpoints" / "best_epoch.json"
    best = json.loads(path.read_text())
    for evaluation in best["evaluations"]:
        evaluation["loss"] -= evaluation["iteration"] == 2
    path.write_text(json.dumps(best | {"checkpoint": "global_step2"}))
    pool.run(1, tune, [*argv, "--lr", "7"])
    card = (output / "README.md").read_text()
    rows = {row["iteration"]: row["lm loss"] for row in metrics(output, "validation")}
    assert "| Length | 2 steps of 4 samples |" in card
    assert f"| lm loss | {rows[0]:.4f} | {rows[2]:.4f} |" in card
    assert "| Learning rate | 0.003, cosine |" in card and "Changed" not in card


def test_adapters_and_merged_model_are_the_same_for_peft(tuned, files):
    peft = pytest.importorskip("peft", reason="the extra tune")
    merged, tokenizer = opened(tuned("dpo-lora"))
    base, _ = opened(Path(files["base"]))
    adapted = peft.PeftModel.from_pretrained(base, tuned("dpo-lora") / "adapter").eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        before = merged(tokens).logits
        difference = (adapted(tokens).logits - before).abs().max()
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - before).abs().max() > 1e-4
    assert difference < 1e-4


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["sft", "lora", "dpo-lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_model(files, tuned, pool, tmp_path, kind, layout):
    """To rounding; what it answers on the way, too."""
    from safetensors.torch import load_file

    processes, more = LAYOUTS[layout]
    output = tmp_path / "tuned"
    pool.run(processes, tune, flags(files, kind, output, *more.split()))
    whole = tuned(kind)
    found, expected = (load_file(each / "model.safetensors") for each in (output, whole))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=2e-3, atol=2e-3)
    assert metrics(output, "text")[:2] == metrics(whole, "text")[:2]
