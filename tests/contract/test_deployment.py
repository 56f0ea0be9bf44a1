"""Alerts, dashboard and unit speak of metrics, flags and limits that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from server.config import ServerSection
from server.config_reading import load_config
from server.metrics import Metrics
from server.watch_metrics import WatchMetrics
from server.wire.messages import SessionState
from worldmodel.messages import MemoryStats, StageTimings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "deployment"


def _metric_names() -> set[str]:
    metrics = Metrics()
    WatchMetrics(metrics.registry)
    names = set()
    for family in metrics.registry.collect():
        names |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    return names


def _rules() -> list[dict[str, object]]:
    return yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]


def _panels() -> list[dict[str, object]]:
    return json.loads((FOLDER / "grafana" / "worldserve.json").read_text(encoding="utf-8"))["panels"]


def test_alerts_and_panels_name_metrics_that_exist() -> None:
    expressions = [str(rule["expr"]) for rule in _rules()]
    expressions += [target["expr"] for panel in _panels() for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"worldserve_\w+", expression)}
    assert len(used) > 15
    assert used <= _metric_names()


def _label_values() -> set[tuple[str, str]]:
    """Return the labels that a server at work shows, with their values."""
    metrics = Metrics()
    for state in SessionState:
        metrics.sessions.labels(state)
    metrics.set_memory(MemoryStats(sessions=0, total_pages=1, free_pages=1))
    metrics.observe_stages(StageTimings(denoise_ms=1, commit_ms=1, decode_ms=1, transfer_ms=1), queue_ms=1)
    return {pair for family in metrics.registry.collect() for each in family.samples for pair in each.labels.items()}


def test_alerts_and_panels_name_label_values_that_exist() -> None:
    expressions = [str(rule["expr"]) for rule in _rules()]
    expressions += [target["expr"] for panel in _panels() for target in panel["targets"]]
    used = {pair for expression in expressions for pair in re.findall(r'(\w+)="([^"]*)"', expression)}
    assert {("state", "active"), ("state", "cleanup_failed"), ("stage", "queue")} <= used
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert used <= _label_values() | {("job", job["job_name"])}


def test_both_sides_of_an_alert_have_the_same_labels() -> None:
    """Prometheus compares series whose labels are equal, and is silent about those that find no partner."""
    registry = Metrics().registry
    labels = {
        sample: set(metric._labelnames) for sample, metric in registry._names_to_collectors.items() if metric._is_parent
    }
    num_compared = 0
    for rule in _rules():
        expression = str(rule["expr"])
        left_out = {
            name for names in re.findall(r"(?:without|ignoring) \((.*?)\)", expression) for name in names.split()
        }
        sides = [labels.get(name, set()) - left_out for name in re.findall(r"worldserve_\w+", expression)]
        assert all(side == sides[0] for side in sides[1:]), rule["alert"]
        num_compared += len(sides) > 1
    assert num_compared == 2


def test_the_alert_about_sessions_that_hold_their_place_looks_at_those() -> None:
    (rule,) = [rule for rule in _rules() if rule["alert"] == "WorldserveSessionsNotReleased"]
    assert rule["expr"] == f'worldserve_sessions{{state="{SessionState.CLEANUP_FAILED}"}} > 0'


def test_the_image_runs_as_a_user_without_rights() -> None:
    runtime = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("AS runtime")[1].splitlines()
    (created,) = [line.split()[-1] for line in runtime if line.startswith("RUN useradd")]
    uid = re.findall(r"--uid (\d+)", "\n".join(runtime))
    users = [line for line in runtime if line.startswith("USER")]
    assert users == [f"USER {created}"]
    assert created != "root"
    assert int(uid[0]) > 0
    assert runtime.index(users[0]) < next(i for i, line in enumerate(runtime) if line.startswith("ENTRYPOINT"))


def test_the_image_can_be_reached_from_outside_at_the_port_that_is_published() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    (port,) = [line.split()[1] for line in lines if line.startswith("EXPOSE ")]
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert int(port) == ServerSection().port
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert [each.split(":")[1] for each in compose["services"]["worldserve"]["ports"]] == [port]


def test_the_unit_starts_what_its_head_installs() -> None:
    unit = (FOLDER / "worldserve.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    (folder,) = re.findall(r"-m venv (\S+)", unit)
    (configs,) = re.findall(r"install -D -t (\S+)", unit)
    (created,) = re.findall(r"useradd .* (\S+)$", unit, re.M)
    program, verb, config = line.split()
    assert (program, verb) == (f"{folder}/bin/worldserve", "serve")
    assert str(Path(config).parent) == configs
    assert load_config(ROOT / "configs" / Path(config).name, environment={}).model.name
    assert re.findall(r"^User=(.*)$", unit, re.M) == [created]


def test_the_unit_gives_up_in_the_end() -> None:
    head, _, service = (FOLDER / "worldserve.service").read_text(encoding="utf-8").partition("[Service]")
    (burst,) = re.findall(r"^StartLimitBurst=(\d+)$", head, re.M)
    (wait_s,) = re.findall(r"^RestartSec=(\d+)$", service, re.M)
    assert re.findall(r"^StartLimitIntervalSec=(.*)$", head, re.M) == ["1h"]
    # A load that fails may take ten minutes, and is counted all the same.
    assert int(burst) * (int(wait_s) + 600) < 3600


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], object] = {}
    for panel in _panels():
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            assert x < 24
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize(
    "name", ["compose.yaml", "prometheus.yaml", "grafana/datasource.yaml", "grafana/dashboards.yaml"]
)
def test_files_are_yaml_and_mount_what_is_there(name: str) -> None:
    content = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    for service in content.get("services", {}).values() if isinstance(content.get("services"), dict) else ():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (FOLDER / source).exists(), source


def test_both_supervisors_wait_longer_than_the_server_needs_to_stop() -> None:
    shutdown_s = ServerSection().shutdown_s
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert int(compose["services"]["worldserve"]["stop_grace_period"].removesuffix("s")) > shutdown_s
    unit = (FOLDER / "worldserve.service").read_text(encoding="utf-8")
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]) > shutdown_s
