#!/usr/bin/env python3
"""Writes the Grafana dashboard deploy/monitoring/dashboards/kvasir.json. The panels are listed in panels.py.

    python3 -m venv /tmp/dashboard && /tmp/dashboard/bin/pip install grafana-foundation-sdk
    /tmp/dashboard/bin/python deploy/monitoring/make_dashboard.py [--check]

--check writes nothing and exits with 1 when the file is not what the panels give.
"""

import argparse
import pathlib
import sys

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from panels import ROWS

FILE = pathlib.Path(__file__).resolve().parent / "dashboards" / "kvasir.json"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS, HEIGHT = 3, 8
GRID_WIDTH = 24


def make_panel(panel):
    built = (timeseries.Panel().title(panel.title).description(panel.question).unit(panel.unit).min(0)
             .datasource(SOURCE).height(HEIGHT).span(GRID_WIDTH // COLUMNS)
             .line_width(1).fill_opacity(10).show_points(common_models.VisibilityMode.NEVER)
             .legend(common.VizLegendOptions().show_legend(True)
                     .display_mode(common_models.LegendDisplayMode.LIST)
                     .placement(common_models.LegendPlacement.BOTTOM)))
    for expr, legend in panel.queries:
        built = built.with_target(prometheus.Dataquery().expr(expr).legend_format(legend).range())
    return built


def make_dashboard():
    made = (dashboard.Dashboard("Kvasir").uid("kvasir").tags(["kvasir", "llm"]).refresh("10s")
            .time("now-1h", "now").timezone("browser").readonly()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
            .with_variable(dashboard.QueryVariable("model").label("Model").datasource(SOURCE)
                           .query("label_values(kvasir_num_requests_running, model_name)")
                           .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
                           .include_all(True).all_value(".*").multi(True)))
    number = 0
    for title, panels in ROWS:
        number += 1
        made = made.with_row(dashboard.Row(title).id(number))
        for panel in panels:
            number += 1
            made = made.with_panel(make_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    text = make_dashboard()
    if not parser.parse_args().check:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text)
    elif FILE.read_text() != text:
        sys.exit(f"{FILE.name} is not what panels.py gives; run deploy/monitoring/make_dashboard.py")


if __name__ == "__main__":
    main()
