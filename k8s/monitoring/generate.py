"""Makes dashboard and rules from one table: python k8s/monitoring/generate.py [--check]

Out, beside this file: dashboard.json (Grafana), dashboard-configmap.yaml (for Grafana's sidecar),
rules.yaml (Prometheus), prometheusrule.yaml (the same for the operator). `--check` writes nothing,
and fails where a file is not what the table makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clamor_ray._protocol.metrics import NODE_METRICS, SESSION_METRICS

HERE = Path(__file__).parent
EXPORTED = {metric.name: metric.exported for metric in (*NODE_METRICS, *SESSION_METRICS)}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
RATE = "[$__rate_interval]"  # Grafana's: four times the interval of scrapes
LASTING = "[5m]"  # of rules: scrapes may be a minute apart
SESSION = 'session=~"$session"'


@dataclass(frozen=True)
class Panel:
    """A picture over time.

    Args:
        title: above it.
        unit: Grafana's name of it.
        lines: legend and expression of each; `{name}` is a metric with the labels of the session.
        about: a sentence.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    about: str = ""


@dataclass(frozen=True)
class Alert:
    """A rule.

    Args:
        name: of the alert.
        value: as a panel's expression, over all sessions.
        above: what it must be above.
        for_: how long.
        severity: warning or critical.
        summary: what is wrong; with Prometheus' templates.
        remedy: what to do.
        also: what lets it fire besides.
    """

    name: str
    value: str
    above: str
    for_: str
    severity: str
    summary: str
    remedy: str
    also: str = ""


def _rates(legend: str, name: str) -> tuple[str, str]:
    return legend, f"rate({{{name}}}{RATE})"


PANELS = (
    Panel("Faults", "ops", (_rates("{{node}}", "clamor_faults"),), "Touches of absent blocks."),
    Panel(
        "Threads that wait for blocks",
        "short",
        (_rates("{{node}}", "clamor_fault_wait_seconds"),),
        "1 is one thread that always waits.",
    ),
    Panel(
        "Mean wait of a fault",
        "s",
        (
            (
                "{{node}}",
                f"rate({{clamor_fault_wait_seconds}}{RATE}) / rate({{clamor_faults}}{RATE})",
            ),
        ),
    ),
    Panel(
        "Network",
        "Bps",
        (
            _rates("received, {{node}}", "clamor_received_bytes"),
            _rates("sent, {{node}}", "clamor_sent_bytes"),
        ),
    ),
    Panel(
        "Blocks fetched",
        "Bps",
        (
            _rates("all, {{node}}", "clamor_fetched_bytes"),
            _rates("of peers, {{node}}", "clamor_peer_fetched_bytes"),
            _rates("of disk and files, {{node}}", "clamor_disk_read_bytes"),
            _rates("made by others, {{node}}", "clamor_degraded_bytes"),
        ),
    ),
    Panel(
        "Cache",
        "bytes",
        (
            ("{{node}}", "{clamor_cached_bytes}"),
            ("budget, {{node}}", "{clamor_cache_budget_bytes}"),
        ),
    ),
    Panel(
        "Evicted, and fetched again",
        "Bps",
        (
            _rates("evicted, {{node}}", "clamor_evicted_bytes"),
            _rates("fetched again, {{node}}", "clamor_refetched_bytes"),
        ),
        "Where both are alike the cache is too small for what tasks use at once.",
    ),
    Panel(
        "Variables at home",
        "bytes",
        (("memory, {{node}}", "{clamor_home_bytes}"), ("disk, {{node}}", "{clamor_disk_bytes}")),
    ),
    Panel(
        "Old versions",
        "bytes",
        (
            ("memory, {{node}}", "{clamor_history_bytes}"),
            ("disk, {{node}}", "{clamor_history_disk_bytes}"),
            ("commits not applied yet, {{node}}", "{clamor_layer_bytes}"),
        ),
    ),
    Panel(
        "Commits",
        "ops",
        (
            _rates("made, {{session}}", "clamor_commits"),
            _rates("conflicts, {{session}}", "clamor_commit_conflicts"),
        ),
    ),
    Panel(
        "Processes, opens",
        "short",
        (
            ("processes, {{node}}", "{clamor_processes}"),
            _rates("opens a second, {{node}}", "clamor_opens"),
        ),
    ),
    Panel(
        "What is not as it should be",
        "short",
        (
            ("lost variables, {{session}}", "{clamor_lost_variables}"),
            ("pieces at risk, {{session}}", "{clamor_degraded_pieces}"),
            ("faults that wait, {{node}}", "{clamor_faults_waiting}"),
            _rates("faults failed, {{node}}", "clamor_faults_failed"),
            _rates("fetches failed, {{node}}", "clamor_fetch_failures"),
            _rates("fetches sent again, {{node}}", "clamor_fetch_retries"),
            _rates("old blocks let go, {{node}}", "clamor_history_expired_blocks"),
            _rates("damaged blocks, {{node}}", "clamor_damaged_blocks"),
        ),
    ),
    Panel(
        "Variables, page servers",
        "short",
        (
            ("variables, {{session}}", "{clamor_variables}"),
            ("page servers, {{session}}", "{clamor_page_servers}"),
        ),
    ),
)

ALERTS = (
    Alert(
        "ClamorVariablesLost",
        "{clamor_lost_variables}",
        "0",
        "0m",
        "critical",
        "{{ $value }} variables of session {{ $labels.session }} are lost, or lack blocks.",
        "clamor status names them, and why. Put them again, or give them a source or redundancy.",
    ),
    Alert(
        "ClamorRedundancyDegraded",
        "{clamor_degraded_pieces}",
        "0",
        "10m",
        "warning",
        "{{ $value }} pieces of session {{ $labels.session }} would not survive one more node.",
        "They are made again by themselves where there are enough nodes: add one.",
    ),
    Alert(
        "ClamorFaultsFail",
        f"increase({{clamor_faults_failed}}{LASTING})",
        "0",
        "0m",
        "critical",
        "Tasks on node {{ $labels.node }} end because blocks cannot be read.",
        "Their error names variable, home and cause.",
    ),
    Alert(
        "ClamorFaultsWait",
        f"rate({{clamor_fault_wait_seconds}}{LASTING})",
        "0.5 * {clamor_processes}",
        "5m",
        "warning",
        "Processes on node {{ $labels.node }} wait for blocks more than half of their time.",
        "clamor top says for which variable. Prefetch, gather rows, or replicate its home.",
    ),
    Alert(
        "ClamorCacheTooSmall",
        f"rate({{clamor_refetched_bytes}}{LASTING})",
        f"0.5 * rate({{clamor_evicted_bytes}}{LASTING})",
        "5m",
        "warning",
        "Node {{ $labels.node }} fetches again what it has just evicted.",
        "Raise CLAMOR_CACHE_BYTES, or give it a disk: CLAMOR_CACHE_DISK_BYTES.",
    ),
    Alert(
        "ClamorBlocksDamaged",
        f"increase({{clamor_damaged_blocks}}{LASTING})",
        "0",
        "0m",
        "critical",
        "Node {{ $labels.node }} has found blocks of a store without their checksum.",
        "clamor fsck, when no session has the store open; replace the disk.",
        # What was found before the first scrape has no increase.
        " or ({clamor_damaged_blocks} >= 1 unless {clamor_damaged_blocks} offset 5m)",
    ),
    Alert(
        "ClamorOldVersionsExpire",
        f"rate({{clamor_history_expired_blocks}}{LASTING})",
        "0",
        "5m",
        "warning",
        "Node {{ $labels.node }} has no room for old versions: snapshots expire.",
        "Raise CLAMOR_HISTORY_BYTES or CLAMOR_HISTORY_DISK_BYTES, or let snapshots go.",
    ),
)


def expression(text: str, labels: str) -> str:
    """PromQL.

    Args:
        text: with `{name}` for each metric.
        labels: what each metric gets.

    Raises:
        KeyError: There is no such metric.
    """
    for name in sorted(EXPORTED, key=len, reverse=True):
        with_labels = f"{EXPORTED[name]}{{{labels}}}" if labels else EXPORTED[name]
        text = text.replace(f"{{{name}}}", with_labels)
    if "{clamor_" in text:
        raise KeyError(f"a metric that is not in the table: {text}")
    return text


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": expression(line, SESSION),
                "legendFormat": legend,
            }
            for i, (legend, line) in enumerate(panel.lines)
        ],
    }


def dashboard() -> dict[str, Any]:
    """Grafana's."""
    variables = f"label_values({EXPORTED['clamor_variables']}, session)"
    return {
        "uid": "clamor-ray",
        "title": "clamor-ray",
        "tags": ["ray", "clamor-ray"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "session",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": {"query": variables, "refId": "session"},
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(i, panel) for i, panel in enumerate(PANELS)],
    }


def rules() -> dict[str, Any]:
    """Prometheus'."""
    return {
        "groups": [
            {
                "name": "clamor-ray",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": expression(f"{alert.value} > {alert.above}{alert.also}", ""),
                        "for": alert.for_,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.remedy},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def files() -> dict[str, str]:
    """All that is made, by name."""
    shown = json.dumps(dashboard(), indent=2, sort_keys=True) + "\n"
    head = "# Made by generate.py: change its table.\n"
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "clamor-ray-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {"clamor-ray.json": shown},
    }
    for_operator = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "clamor-ray", "labels": {"release": "prometheus"}},
        "spec": rules(),
    }

    def as_yaml(what: dict[str, Any]) -> str:
        return head + yaml.safe_dump(what, sort_keys=False, width=100)

    return {
        "dashboard.json": shown,
        "dashboard-configmap.yaml": as_yaml(config_map),
        "rules.yaml": as_yaml(rules()),
        "prometheusrule.yaml": as_yaml(for_operator),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Makes dashboard and rules.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where one differs"
    )
    checks = parser.parse_args(arguments).check
    differ = []
    for name, text in files().items():
        path = HERE / name
        if not path.exists() or path.read_text() != text:
            differ.append(name)
            if not checks:
                path.write_text(text)
    if differ:
        print(f"{'not what the table makes' if checks else 'written'}: {', '.join(differ)}")
    return int(checks and bool(differ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
