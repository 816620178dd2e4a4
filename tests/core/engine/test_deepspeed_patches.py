"""Replacements inside DeepSpeed are made where they were tried, and not made silently elsewhere."""

import re
from pathlib import Path

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron.config import ConfigError
from megatron.engine import deepspeed_patches as patches
from megatron.engine import deepspeed_replacements as replacements

ROOT = Path(__file__).parents[3]
ALL = {
    name: value
    for name, value in vars(replacements).items()
    if isinstance(value, replacements.Replacement)
}
OUTSIDE = ["0.18.9", "0.19.9", "0.20.0", "1.0"]


@pytest.fixture(autouse=True)
def afresh():
    """Nothing is remembered of earlier tests."""
    replacements.made.cache_clear()
    yield
    replacements.made.cache_clear()


newest = pytest.mark.skipif(
    deepspeed.__version__ != replacements.LAST, reason="older versions lack some of it"
)


@newest
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"NO_COMPILER"}))
def test_the_installed_deepspeed_looks_as_expected(name, capsys):
    """Muon, which NO_COMPILER is about, is imported already in this process."""
    assert replacements.made(ALL[name])
    replacements.require(ALL[name])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_has_a_test(name):
    file, test = ALL[name].test.split("::")
    assert f"def {test}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("version", OUTSIDE)
@pytest.mark.parametrize("name", sorted(ALL))
def test_other_versions_go_their_own_way_and_say_so_once(monkeypatch, capsys, name, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert not replacements.made(ALL[name]) and not replacements.made(ALL[name])
    (line,) = capsys.readouterr().out.splitlines()
    assert f"DeepSpeed {version} is not one of {replacements.FIRST} to {replacements.LAST}" in line
    assert ALL[name].what in line and ALL[name].otherwise in line
    with pytest.raises(ConfigError, match=f"deepspeed=={replacements.LAST}"):
        replacements.require(ALL[name])


@pytest.mark.parametrize("version", ["0.19.0", "0.19.4", "0.19.8", "0.19.8+abc123"])
def test_versions_between_count(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert replacements.made(replacements.NO_COPIES)


def test_only_the_first_process_says_it(monkeypatch, capsys):
    monkeypatch.setattr(deepspeed, "__version__", OUTSIDE[0])
    monkeypatch.setenv("RANK", "1")
    assert not replacements.made(replacements.NO_COPIES)
    assert not capsys.readouterr().out


def other_parameters(self, gradients):
    """Instead of a method that took others."""


@pytest.mark.parametrize(
    ("owner", "method", "replacement"),
    [
        (DeepSpeedEngine, "buffered_allreduce_fallback", replacements.NO_COPIES),
        (DeepSpeedZeroOptimizer, "_update_scale", replacements.SCALE_GROWS_LATER),
        (DeepSpeedZeroOptimizer, "step", replacements.OWN_REDUCTION),
        (DeepSpeedZeroOptimizer, "reduce_gradients", replacements.OWN_REDUCTION),
        (replacements.PipelineModule, "_set_bounds", replacements.OWN_SCHEDULES),
    ],
)
def test_another_shape_is_noticed(monkeypatch, capsys, owner, method, replacement):
    monkeypatch.setattr(owner, method, other_parameters)
    assert not replacements.made(replacement)
    assert "has unexpected code" in capsys.readouterr().out
    monkeypatch.delattr(owner, method)
    replacements.made.cache_clear()
    # Inherited methods are found where they come from.
    assert not replacements.made(replacement) or hasattr(owner, method)


@pytest.mark.parametrize(("dynamic", "refused"), [(True, True), (False, False)])
def test_fp16_is_refused_where_its_scale_grows_too_early(monkeypatch, dynamic, refused):
    class Wrapper:
        """DeepSpeed's optimizer, as far as it is looked at."""

        dynamic_loss_scale = dynamic
        asked: list[bool] = []

        def _update_scale(self, has_overflow=False):
            self.asked.append(has_overflow)

    wrapper = Wrapper()
    grow = patches.defer_scale_growth(wrapper)
    wrapper._update_scale(False)
    if dynamic:
        assert wrapper.asked == []
        wrapper._update_scale(True)
        grow()
        assert wrapper.asked == [True, False]
    monkeypatch.setattr(deepspeed, "__version__", OUTSIDE[0])
    if refused:
        with pytest.raises(ConfigError, match="half the gradients: give a --loss-scale"):
            patches.defer_scale_growth(Wrapper())
    else:
        patches.defer_scale_growth(Wrapper())


def test_pipelines_are_refused_where_they_were_not_tried(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", OUTSIDE[0])
    with pytest.raises(ConfigError, match="leave out --pipeline-model-parallel-size"):
        patches.PlacedModule([], None, [0], [], int)


def test_fp16_is_taken_on_every_cpu(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    patches.allow_fp16()
    assert get_accelerator().is_fp16_supported()


def test_the_package_asks_for_the_versions_that_were_tried():
    (range_,) = re.findall(r'"deepspeed([^"]*)"', (ROOT / "setup.py").read_text())
    assert range_ == f">={replacements.FIRST},<={replacements.LAST}"


def test_nothing_else_replaces_methods_of_deepspeed():
    """By name: what is set on DeepSpeed's objects, in other files of the package."""
    set_on = re.compile(r"\b(wrapper|engine\.engine|accelerator\(\)|deepspeed\.\w+)\.\w+ = ")
    for path in (ROOT / "megatron").rglob("*.py"):
        if path.name != "deepspeed_patches.py":
            assert not set_on.search(path.read_text()), path
