"""Dashboard and rules are what their table makes, and the rules fire when they are to."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from clamor_ray._observe.stats import EngineStats
from clamor_ray._protocol.metrics import NODE_METRICS, SESSION_METRICS
from tests.support.lab.availability import missing

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
NODE = '{node="a", session="s"}'
SESSION = '{session="s"}'
MINUTES = 20  # of each series, a sample each 15 s


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", MONITORING / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


generate = load()


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        missing("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series(name: str, step: float, labels: str, start: float = 0.0) -> dict[str, str]:
    return {"series": f"{name}{labels}", "values": f"{start:g}+{step:g}x{4 * MINUTES}"}


# What lets each alert fire: series with their growth in 15 s, or where it is 0, their level.
FIRES: dict[str, list[dict[str, str]]] = {
    "ClamorVariablesLost": [series("ray_clamor_lost_variables", 0, SESSION, 2)],
    "ClamorRedundancyDegraded": [series("ray_clamor_degraded_pieces", 0, SESSION, 1)],
    "ClamorFaultsFail": [series("ray_clamor_faults_failed_total", 1, NODE)],
    "ClamorFaultsWait": [
        series("ray_clamor_fault_wait_seconds_total", 18, NODE),
        series("ray_clamor_processes", 0, NODE, 2),
    ],
    "ClamorCacheTooSmall": [
        series("ray_clamor_refetched_bytes_total", 60, NODE),
        series("ray_clamor_evicted_bytes_total", 100, NODE),
    ],
    "ClamorBlocksDamaged": [series("ray_clamor_damaged_blocks_total", 1, NODE)],
    "ClamorOldVersionsExpire": [series("ray_clamor_history_expired_blocks_total", 1, NODE)],
}
QUIET: dict[str, list[dict[str, str]]] = {
    "ClamorVariablesLost": [series("ray_clamor_lost_variables", 0, SESSION)],
    "ClamorRedundancyDegraded": [series("ray_clamor_degraded_pieces", 0, SESSION)],
    "ClamorFaultsFail": [series("ray_clamor_faults_failed_total", 0, NODE, 7)],
    "ClamorFaultsWait": [
        series("ray_clamor_fault_wait_seconds_total", 12, NODE),
        series("ray_clamor_processes", 0, NODE, 2),
    ],
    "ClamorCacheTooSmall": [
        series("ray_clamor_refetched_bytes_total", 0, NODE),
        series("ray_clamor_evicted_bytes_total", 0, NODE),
    ],
    "ClamorBlocksDamaged": [series("ray_clamor_damaged_blocks_total", 0, NODE, 3)],
    "ClamorOldVersionsExpire": [series("ray_clamor_history_expired_blocks_total", 0, NODE, 3)],
}


# What may happen once, and is to be said.
ONCE = {
    "ClamorFaultsFail": "ray_clamor_faults_failed_total",
    "ClamorBlocksDamaged": "ray_clamor_damaged_blocks_total",
}


def test_damage_that_was_found_before_the_first_scrape_is_said(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    late = {"series": f"ray_clamor_damaged_blocks_total{NODE}", "values": "_x20 3x40"}
    test = {
        "interval": "15s",
        "input_series": [late],
        "alert_rule_test": [{"eval_time": "6m", "alertname": "ClamorBlocksDamaged"}],
    }
    rules = str(MONITORING / "rules.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test]}))
    promtool("--version")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    assert "critical" in done.stdout + done.stderr  # it fires; nothing was expected


def test_files_are_what_the_table_makes() -> None:
    assert generate.main(["--check"]) == 0


def test_each_metric_has_its_place_and_its_number() -> None:
    shown = json.dumps(generate.dashboard())
    names = [metric.name for metric in (*NODE_METRICS, *SESSION_METRICS)]
    assert len(set(names)) == len(names)
    assert [name for name in names if generate.EXPORTED[name] not in shown] == []
    numbers = {"cache_budget_bytes", *EngineStats.__dataclass_fields__}
    assert [m.name for m in NODE_METRICS if not set(m.sources) <= numbers] == []


def test_an_expression_names_metrics_that_there_are() -> None:
    assert generate.expression("rate({clamor_faults}[1m])", 'a="b"') == (
        'rate(ray_clamor_faults_total{a="b"}[1m])'
    )
    with pytest.raises(KeyError, match="clamor_nothing"):
        generate.expression("{clamor_nothing}", "")


def test_rules_are_read_by_prometheus() -> None:
    assert f"{len(generate.ALERTS)} rules found" in promtool(
        "check", "rules", str(MONITORING / "rules.yaml")
    )


@pytest.mark.parametrize("alert", [alert.name for alert in generate.ALERTS])
def test_each_rule_fires_when_it_is_to(alert: str, tmp_path: Path) -> None:
    (rule,) = (each for each in generate.ALERTS if each.name == alert)
    late = f"{MINUTES - 1}m"

    def case(inputs: list[dict[str, str]], at: str, fires: bool) -> dict[str, Any]:
        said = {} if fires else {"exp_alerts": []}
        return {
            "interval": "15s",
            "input_series": inputs,
            "alert_rule_test": [{"eval_time": at, "alertname": alert, **said}],
        }

    def run(*cases: dict[str, Any]) -> str:
        path = tmp_path / "test.yaml"
        rules = str(MONITORING / "rules.yaml")
        path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": list(cases)}))
        done = subprocess.run(
            ["promtool", "test", "rules", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return "" if done.returncode == 0 else done.stdout + done.stderr

    promtool("--version")
    assert run(case(QUIET[alert], late, fires=False)) == ""
    once = {**series(f"{ONCE[alert]}", 0, NODE), "values": "0x40 1x40"} if alert in ONCE else None
    if once is not None:  # it happens once, and is said
        assert f'severity="{rule.severity}"' in run(case([once], "11m", fires=False))
    # Promtool compares an alert's labels and texts, too: what it got is in what it says.
    got = run(case(FIRES[alert], late, fires=False))
    assert f'severity="{rule.severity}"' in got
    assert rule.remedy[:30] in got.replace('\\\\"', '"')
    assert "{{" not in got
    if rule.for_ != "0m":  # it waits: what lasts for a moment says nothing
        assert run(case(FIRES[alert], "15s", fires=False)) == ""
