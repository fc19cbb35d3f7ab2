"""The page of MLflow's UI that compares an experiment's runs, and the links that open it.

MLflow can share a view of its charts: a tag of the experiment holds it, and a key in the address opens it. Without such
a view the curves and costs that an ablation is about would be somewhere among dozens of charts.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

LOCAL_URL = "http://127.0.0.1:5000"

_KEY = "ablate"
VIEW_TAG = f"mlflow.sharedViewState.{_KEY}"

RUN_COLOUR_TAG = "mlflow.runColor"

CURRENT_TAG = "ablate.current"
"""Whether a run's trial belongs to the experiment as it is now: `yes` or `no`."""

_PRESENT = f"tags.`{CURRENT_TAG}` = 'yes'"

_CURVES = ("val_loss",)
_BARS = ("kv_cache_bytes_per_token", "params_total", "train_tokens_per_second")


def comparison_links(base_url: str, document: Mapping[str, Any]) -> dict[str, str]:
    """Pages that compare the runs of an experiment's mlflow.json, in the UI at `base_url`.

    `comparison` shows each run's loss curve beside its costs, `charts` all charts, `table` all settings and numbers.
    """
    experiment = document["experiment_id"]
    base = base_url.rstrip("/")
    charts = f"{base}/#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    runs, experiments = _in_address(list(document["runs"].values())), _in_address([experiment])
    return {
        "comparison": f"{charts}&viewStateShareKey={_KEY}",
        "charts": f"{charts}&searchFilter={quote(_PRESENT, safe='')}",
        "table": f"{base}/#/compare-runs?runs={runs}&experiments={experiments}",
    }


def _in_address(values: list[str]) -> str:
    return quote(json.dumps(values, separators=(",", ":")), safe="")


def view_state() -> str:
    """The shared view: a section of its own, first, with the loss and what it costs; all present runs shown."""
    section = {"uuid": _KEY, "name": "Comparison", "display": True, "isReordered": True, "columns": 2}
    others = [{"uuid": name, "name": name, "display": True} for name in ("Model metrics", "System metrics")]
    state = {
        "compareRunCharts": [*(_card("LINE", key) for key in _CURVES), *(_card("BAR", key) for key in _BARS)],
        "compareRunSections": [section, *others],
        "isAccordionReordered": True,
        "runsHiddenMode": "SHOW_ALL",
        "searchFilter": _PRESENT,
        "hideEmptyCharts": True,
    }
    return json.dumps(state)


def _card(kind: str, metric: str) -> dict[str, Any]:
    card = {"uuid": metric, "type": kind, "metricSectionId": _KEY, "metricKey": metric, "displayName": metric}
    if kind == "LINE":
        card |= {"xAxisKey": "step", "yAxisKey": "metric", "xAxisScaleType": "linear", "scaleType": "linear"}
        return {**card, "range": {}, "selectedMetricKeys": [metric], "lineSmoothness": 0}
    return card


def run_colour(place: int) -> str:
    """A colour for all runs of the variant at `place`, unlike those of its neighbours."""
    turns = place * 0.618034 + 0.6
    red, green, blue = colorsys.hls_to_rgb(turns % 1, 0.42 if place % 2 else 0.55, 0.7)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
