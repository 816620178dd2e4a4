"""Recipes train at small size as their curves say, and their pages are true."""

import re
import sys
from pathlib import Path

import pytest
from samples import sampled
from training_jobs import train

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))

import gallery
import recipes
from recipes import BY_NAME, CURVES, PAGES, PICTURES, RECIPES, STEPS

KNOWN = recipes.curves()
PIECE = 6
"""Steps of the piece of a curve that is always compared."""


@pytest.fixture(scope="module")
def data(realdata, tmp_path_factory):
    return recipes.SmallData(realdata, tmp_path_factory.mktemp("recipes"))


@pytest.mark.realdata
@pytest.mark.parametrize("rate", sampled(("4e-3", "1e-2"), ("4e-3").__eq__))
def test_the_first_steps_of_a_curve(rate, pool, data, tmp_path):
    """Another rate is outside the band."""
    recipe = BY_NAME["gpt2-124m"]
    settings = data.settings(recipe) | {"SMALL": "1", "RUNS": str(tmp_path)}
    flags = recipes.printed(recipe.script, "--lr", rate, **settings)[1]
    (record,) = pool.run(1, train, [*flags, "--exit-interval", str(PIECE)])
    assert len(record.losses) == PIECE
    assert (recipes.outside(record.losses, KNOWN[recipe.name]) == []) == (rate == "4e-3")


@pytest.mark.proof
@pytest.mark.realdata
@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_small_run_has_the_losses_of_its_curve(name, data):
    losses = recipes.train_small(BY_NAME[name], data)
    assert len(losses) == len(KNOWN[name])
    assert recipes.outside(losses, KNOWN[name]) == []


@pytest.mark.parametrize("name", sampled(BY_NAME, ("gpt2-124m", "grpo").__contains__))
def test_the_page_is_what_the_generator_writes(name):
    """So is the command of the full size resolved, at its number of processes."""
    recipe = BY_NAME[name]
    assert (PAGES / f"{name}.md").read_text() == recipes.page(recipe, KNOWN[name])
    config = recipes.run_of(recipe)
    assert config.training.global_batch_size % config.parallel.data_parallel_size == 0
    need = float(re.match(r"[\d.]+", recipes.facts(recipe)["memory of a GPU"])[0])
    assert 1 < need < 76, "80 GiB, of which 4 are left to CUDA"


@pytest.mark.proof
def test_the_gallery_is_what_the_generator_writes():
    assert (PAGES / "index.md").read_text() == recipes.gallery(KNOWN)


def test_runs_of_the_gallery_are_those_of_the_curves():
    """Their logs are inside the bands, their values those of the commands."""
    kept = gallery.records()
    assert gallery.PAGE.read_text() == gallery.page(kept)
    assert set(kept) <= set(KNOWN) and len(kept) >= 8
    for name, run in kept.items():
        losses = [row[1] for row in run["log"]]
        assert len(losses) == len(KNOWN[name])
        assert recipes.outside(losses, KNOWN[name]) == []
        assert run["processes"] == BY_NAME[name].small_processes
        assert len(run["configuration"]) > 20
        assert "/tmp" not in str(run["configuration"])
    values = {name: value for name, (value, _) in kept["gpt2-124m"]["configuration"].items()}
    assert values["hidden_size"] == "64" and values["lr"] == "0.004"
    assert values["data_path"] == '["DATA/gpt/text_document"]'


def test_every_recipe_has_script_curve_page_and_picture():
    scripts = {path.stem for path in recipes.FOLDER.glob("*.sh")} - {"common"}
    assert scripts == set(BY_NAME) == set(KNOWN), CURVES
    assert {path.stem for path in PAGES.glob("*.md")} == {*BY_NAME, "index", "gallery"}
    gallery = (PAGES / "index.md").read_text()
    for recipe in RECIPES:
        losses = KNOWN[recipe.name]
        assert len(losses) == STEPS or recipe.base is not None
        sign = 1 if recipe.measure == "loss" else -1
        assert sign * sum(losses[-5:]) < sign * sum(losses[:5]), "it learns"
        assert (PICTURES / f"recipe-{recipe.name}.png").stat().st_size < 60_000
        assert f"({recipe.name}.md)" in gallery


def test_a_step_outside_the_band_is_named():
    assert recipes.outside([1.0, 2.0, 3.1], [1.0, 2.03, 3.0]) == [
        "step 3: 3.1000 instead of 3.0000"
    ]
    assert recipes.outside([float("nan")], [1.0])
