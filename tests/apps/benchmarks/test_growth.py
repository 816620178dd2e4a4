"""How growth is fitted, set next to formulas and drawn."""

import growth
import growth_plots
import pytest


def points(seconds, formula, values=(2, 4, 8)):
    shape = {"layers": 2, "hidden": 64, "sequence": 8, "vocabulary": 128, "micro_batch": 1}
    return [
        {
            "value": value,
            "layout": "dp1",
            "shape": shape | {"micro_batches": 1},
            "cpu_seconds": seconds(value),
            "formula_seconds": formula(value),
            "ratio": seconds(value) / formula(value),
            "bytes": 2**20 * 3.0 * value,
            "formula_bytes": 2**20 * 2.0 * value,
        }
        for value in values
    ]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_exponent_of_a_power(power):
    assert growth.exponent([(x, 7.0 * x**power) for x in (1, 3, 10, 64)]) == pytest.approx(power)


def test_exponent_needs_two_sizes():
    with pytest.raises(ValueError, match="at least two sizes"):
        growth.exponent([(4, 1.0), (4, 2.0)])


def test_report_says_what_grows_faster_than_its_formula():
    text = growth.report("width", points(lambda x: 0.01 * x**2, lambda x: 0.005 * x**1.5))
    assert "power 2.00 in time, the formula as 1.50; 1.00 in memory, the formula as 1.00" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 8 ")]
    assert [cell.strip("| ") for cell in rows[0]] == [
        "8", "640", "113", "5.66", "2.00", "24", "16", "+50%"
    ]  # fmt: skip


def test_one_size_is_varied_at_a_time():
    for kind, (field, values, fixed) in growth.VARIED.items():
        shapes = [shape for _, _, shape in growth.cases(kind)]
        assert [getattr(shape, field) for shape in shapes] == list(values)
        rest = [{k: v for k, v in vars(shape).items() if k != field} for shape in shapes]
        assert all(each == rest[0] for each in rest), kind
        assert {k: rest[0][k] for k in fixed} == fixed


def test_layouts_share_a_shape():
    found = growth.cases("layout")
    assert len({shape for _, _, shape in found}) == 1
    assert [layout.name for _, layout, _ in found] == [value for value, _, _ in found]


def test_point_takes_ratios_within_a_turn():
    """The machine is three times as slow in the second turn, for both."""

    def sample(cpu):
        return growth.Sample(2, cpu, 0.0, 0.0, 0.0, 0, 0.0)

    found = growth.point([sample(2.0), sample(6.0), sample(2.0)], [0.5, 1.5, 0.5], 10.0, 5.0)
    assert found == {
        "cpu_seconds": 1.0,
        "formula_seconds": 0.5,
        "ratio": 2.0,
        "bytes": 10.0,
        "formula_bytes": 5.0,
    }


@pytest.mark.parametrize("values", [(2, 4, 8), ("dp1", "dp2", "tp2")])
def test_plot_has_axes_with_units(tmp_path, values):
    drawn = points(lambda x: 0.01 * x, lambda x: 0.005 * x)
    for point, value in zip(drawn, values, strict=True):
        point["value"] = value
    path = tmp_path / "growth-width.png"
    growth_plots.plot("hidden size", drawn, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
