"""Joules of counters to money and CO2, over the starts of a run; and the time that is left."""

import json

import pytest
import torch

from megatron.features.energy import callback as meter_module
from megatron.features.energy.callback import (
    FILE,
    EnergyMeter,
    Joules,
    Prices,
    RunEnergy,
    Totals,
    read_totals,
    write_totals,
)
from megatron.parallel.mesh import Mesh
from megatron.training.intervals import TimeLeft
from megatron.training.registry import METRICS


class Counter:
    def __init__(self, value=100.0):
        self.value = value

    def joules(self):
        if self.value is None:
            raise OSError("the driver has gone")
        return self.value


def test_a_meter_counts_from_its_start_by_kind(caplog):
    gpu, host, second = Counter(100), Counter(7), Counter(0)
    meter = EnergyMeter([("devices", gpu), ("processors", host), ("devices", second)])
    gpu.value, host.value, second.value = 130, 8, 5
    assert meter.used(["devices", "processors"]) == [35, 1]
    second.value = None
    gpu.value = 140
    assert meter.used(["devices"]) == [45]
    assert meter.used(["devices"]) == [45]
    assert [record.getMessage() for record in caplog.records] == [
        "energy of devices is no longer counted: the driver has gone"
    ]
    meter.close()


def test_a_thread_reads_often_enough(monkeypatch):
    monkeypatch.setattr(meter_module, "_BETWEEN_READINGS", 0.001)
    read = []

    class Watched(Counter):
        def joules(self):
            read.append(None)
            if len(read) == 5:
                enough.set()
            return 1.0

    enough = meter_module.threading.Event()
    meter = EnergyMeter([("devices", Watched())])
    assert enough.wait(60)
    meter.close()


def test_one_process_without_counters(monkeypatch):
    def denied():
        raise PermissionError(13, "Permission denied", "/sys/class/powercap/x")

    monkeypatch.setattr(meter_module, "RaplCounter", denied)
    energy = RunEnergy(Mesh(), torch.device("cpu"))
    assert not energy.counted and energy.used() == Joules(None, None)
    assert energy.refused == [
        "energy of processors is not counted: only root may read /sys/class/powercap/x"
    ]
    assert energy.absent == []


def test_one_process_with_processors(monkeypatch):
    counter = Counter(50)
    monkeypatch.setattr(meter_module, "RaplCounter", lambda: counter)
    energy = RunEnergy(Mesh(), torch.device("cpu"))
    counter.value = 60
    assert energy.used() == Joules(None, 10.0) and energy.used().total == 10.0
    energy.close()


def test_money_and_co2():
    prices = Prices(device_hour=2.0, gco2_per_kwh=300.0)
    joules = Joules(devices=3.6e6, processors=1.8e6)
    totals = prices.totals(joules, device_seconds=8 * 1800)
    assert totals == Totals(3.6e6, 1.8e6, 14400, 8.0, 450.0)
    again = totals.plus(totals)
    shown = prices.spending(again, joules, cost_left=prices.cost(3600))
    assert shown == {
        "energy_joules": 10.8e6, "devices_joules": 7.2e6, "processors_joules": 3.6e6,
        "device_seconds": 28800, "cost": 16.0, "co2_grams": 900.0, "cost_left": 2.0,
    }  # fmt: skip
    assert [METRICS[name].field(shown) for name in shown if METRICS[name].label] == [
        "energy (kWh): 3", "cost: 16.00", "CO2 (kg): 0.9", "cost to finish: 2",
    ]  # fmt: skip


def test_what_is_not_known_is_left_out():
    shown = Prices().spending(Totals(device_seconds=5), Joules(None, None), None)
    assert shown == {"device_seconds": 5} and not METRICS["device_seconds"].label
    # A price of electricity without counters gives no CO2: not 0 of it.
    assert "co2_grams" not in Prices(None, 300.0).spending(Totals(), Joules(None, None), None)


def test_totals_are_kept(tmp_path):
    assert read_totals(tmp_path) == Totals()
    totals = Totals(1.5, 2.0, 3.0, 4.0, 5.0)
    write_totals(tmp_path, totals)
    assert read_totals(tmp_path) == totals


@pytest.mark.parametrize(
    "content", ["", "[]", '{"cost": -1}', '{"cost": "x"}', '{"cost": null}', '{"cost": 1e999}']
)
def test_damaged_totals_are_said_and_begin_at_zero(tmp_path, caplog, content):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(content)
    assert read_totals(tmp_path) == Totals()
    assert "counted from zero" in caplog.text


def test_unknown_values_of_a_later_version_are_no_damage(tmp_path):
    write_totals(tmp_path, Totals(cost=4.0))
    found = json.loads((tmp_path / FILE).read_text()) | {"water_litres": 3}
    (tmp_path / FILE).write_text(json.dumps(found))
    assert read_totals(tmp_path) == Totals(cost=4.0)


def test_time_left_follows_the_speed_of_the_last_lines():
    now = [0.0]
    left = TimeLeft(lambda: now[0])
    left.begin(100)
    now[0] = 50.0  # compiling
    assert left.seconds(110, 200) == pytest.approx(5 * 90)
    for line in range(1, 31):
        now[0] += 10.0
        assert left.seconds(110 + 10 * line, 1000) == pytest.approx(1.0 * (890 - 10 * line))
    for line in range(1, 21):  # all that counts is slow by now
        now[0] += 30.0
        found = left.seconds(410 + 10 * line, 1000)
    assert found == pytest.approx(3.0 * 390, rel=0.1)
    left.begin(300)
    now[0] += 1.0
    assert left.seconds(310, 320) == pytest.approx(1.0)
    assert left.seconds(320, 320) == 0.0
