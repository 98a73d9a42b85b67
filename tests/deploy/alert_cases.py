"""One case for each alert of deploy/monitoring/alert_rules.yml, in promtool's notation: a sample a minute.

`series` makes the alert fire: it is pending at `pending` (or quiet, where the alert has no wait), fires at `fires`
and is over at `over`. `quiet` comes as near as it can without an alert at any of these times.
"""

import dataclasses
from typing import Dict, Optional

COORDINATOR = 'model_name="m",job="kvasir",instance="c:9400"'
WORKER = 'model_name="m",rank="0",job="kvasir-worker",instance="w:9401"'
CERTIFIED = 'job="kvasir",instance="c:9400"'
OF_COORDINATOR = {"model_name": "m", "job": "kvasir", "instance": "c:9400"}
OF_WORKER = {"model_name": "m", "rank": "0", "job": "kvasir-worker", "instance": "w:9401"}


@dataclasses.dataclass
class Case:
    alert: str
    series: Dict[str, str]
    quiet: Dict[str, str]
    pending: str
    fires: str
    over: str
    labels: Dict[str, str]
    summary: str
    severity: str = "warning"


def of_coordinator(name, more=""):
    return f"kvasir_{name}{{{COORDINATOR}{more}}}"


def of_worker(name, more=""):
    return f"kvasir_{name}{{{WORKER}{more}}}"


def histogram(name, fast, slow, bounds):
    """Buckets of a histogram: `fast` observations up to the first bound, `slow` ones up to the second."""
    low, high = bounds
    return {of_coordinator(name, f',le="{low}"'): fast, of_coordinator(name, f',le="{high}"'): slow,
            of_coordinator(name, ',le="+Inf"'): slow}


def once(name, more="", *, alert, where=of_worker, labels: Optional[Dict[str, str]] = None, minutes, summary,
         severity="warning"):
    """A counter that must not rise: it fires with the first rise and ends when that is `minutes` old."""
    owner = OF_WORKER if where is of_worker else OF_COORDINATOR
    return Case(alert, {where(name, more): "0x5 1x60"}, {where(name, more): "7x70"}, "5m", "7m", f"{minutes + 8}m",
                {**owner, **(labels or {})}, summary, severity)


AVAILABILITY = [
    Case("KvasirProcessDown", {f"up{{{COORDINATOR}}}": "1x4 0x5 1x9"}, {f"up{{{COORDINATOR}}}": "1x4 0 1x12"}, "5m",
         "6m", "12m", OF_COORDINATOR, "kvasir c:9400 does not answer", "critical"),
    Case("KvasirRankDown", {of_coordinator("worker_up", ',rank="1"'): "1x4 0x5 1x9"},
         {of_coordinator("worker_up", ',rank="1"'): "1x4 0 1x12"}, "5m", "6m", "12m",
         {"model_name": "m", "instance": "c:9400", "rank": "1"},
         "rank 1 of c:9400 is in no group: nothing is served", "critical"),
    once("worker_group_losses_total", alert="KvasirGroupLost", where=of_coordinator, minutes=10,
         summary="c:9400 lost its worker group; its requests wait for the next one"),
    Case("KvasirAdmissionStalled",
         {of_coordinator("num_requests_waiting"): "0x4 3x20", of_coordinator("num_requests_running"): "0x9 1x20"},
         {of_coordinator("num_requests_waiting"): "0x4 3x20", of_coordinator("num_requests_running"): "1x30"}, "6m",
         "7m", "10m", OF_COORDINATOR, "3 requests wait at c:9400 and none runs", "critical"),
    # Promtool's clock begins at 0: seven days and an hour are left, and a new certificate comes at 130 minutes.
    Case("KvasirCertificateExpires",
         {f'kvasir_tls_certificate_expiry_timestamp_seconds{{role="certificate",{CERTIFIED}}}': "608400x129 7e6x30"},
         {f'kvasir_tls_certificate_expiry_timestamp_seconds{{role="certificate",{CERTIFIED}}}': "608400x118 7e6x41"},
         "119m", "125m", "135m", {"job": "kvasir", "instance": "c:9400", "role": "certificate"},
         "the certificate of kvasir c:9400 expires in 6d 22h 55m 0s"),
    Case("KvasirRequestsFail",
         {of_coordinator("request_success_total", ',finished_reason="error"'): "0+10x19 190x30",
          of_coordinator("request_success_total", ',finished_reason="stop"'): "0+90x60"},
         {of_coordinator("request_success_total", ',finished_reason="error"'): "0+5x60",
          of_coordinator("request_success_total", ',finished_reason="stop"'): "0+95x60"},
         "5m", "10m", "25m", {"model_name": "m"}, "10% of the requests to m fail", "critical"),
    Case("KvasirConnectionsRefused", {of_coordinator("connections_refused_total", ',reason="full"'): "0x4 0+2x9 20x30"},
         {of_coordinator("connections_refused_total", ',reason="full"'): "0x4 2x60"}, "9m", "12m", "22m",
         {"job": "kvasir", "instance": "c:9400"}, "kvasir c:9400 refuses connections", "critical"),
]

LATENCY = [
    Case("KvasirQueueFull",
         {of_coordinator("requests_rejected_total", ',reason="resource_exhausted"'): "0+20x19 380x30",
          of_coordinator("request_success_total", ',finished_reason="stop"'): "0+80x60"},
         {of_coordinator("requests_rejected_total", ',reason="resource_exhausted"'): "0+1x60",
          of_coordinator("requests_rejected_total", ',reason="invalid_argument"'): "0+90x60",
          of_coordinator("request_success_total", ',finished_reason="stop"'): "0+80x60"},
         "5m", "10m", "25m", {"model_name": "m"}, "20% of the requests to m are refused"),
    Case("KvasirQueueSlow", histogram("request_queue_time_seconds_bucket", "0x60", "0+5x20 100x30", (30, 40)),
         histogram("request_queue_time_seconds_bucket", "0+5x60", "0+5x60", (30, 40)), "10m", "12m", "30m",
         {"model_name": "m"}, "one request in ten to m waits longer than 39s"),
    Case("KvasirFirstTokenSlow", histogram("time_to_first_token_seconds_bucket", "0+1x60", "0+5x20 100x30", (40, 80)),
         histogram("time_to_first_token_seconds_bucket", "0+5x60", "0+5x60", (40, 80)), "10m", "12m", "30m",
         {"model_name": "m"}, "first tokens of m take 1m 19s (p99)"),
    Case("KvasirTokensSlow", histogram("inter_token_latency_seconds_bucket", "0+1x60", "0+5x20 100x30", (1, 2.5)),
         histogram("inter_token_latency_seconds_bucket", "0+5x60", "0+5x60", (1, 2.5)), "10m", "12m", "30m",
         {"model_name": "m"}, "tokens of m are 2.481s apart (p99)"),
]

KV = [
    Case("KvasirKvFull", {of_coordinator("kv_cache_usage_perc"): "0.5x4 0.95x20 0.5x20"},
         {of_coordinator("kv_cache_usage_perc"): "0.9x60"}, "14m", "15m", "26m", OF_COORDINATOR,
         "running requests hold 95% of the host tier of c:9400"),
    Case("KvasirPreemptions",
         {of_coordinator("num_preemptions_total", ',kind="swap"'): "0+1x30 30x30",
          of_coordinator("num_preemptions_total", ',kind="recompute"'): "0+1x30 30x30"},
         {of_coordinator("num_preemptions_total", ',kind="swap"'): "0+1x60",
          of_coordinator("num_preemptions_total", ',kind="loss"'): "0x4 30x56"}, "14m", "25m", "45m",
         {"model_name": "m", "instance": "c:9400"}, "c:9400 took blocks from 20 running requests in ten minutes"),
    once("kv_page_checksum_failures_total", ',tier="host"', alert="KvasirKvCorrupt", labels={"tier": "host"}, minutes=15,
         summary="tier host of w:9401 returned other bytes than were stored", severity="critical"),
    once("failed_rows_total", ',code="DATA_LOSS"', alert="KvasirRowsFailed", labels={"code": "DATA_LOSS"}, minutes=15,
         summary="requests failed on rank 0 of w:9401: DATA_LOSS", severity="critical"),
]

DISK = [
    Case("KvasirDiskReadOnly", {of_worker("kv_tier_read_only", ',tier="disk"'): "0x4 1x5 0x9"},
         {of_worker("kv_tier_read_only", ',tier="disk"'): "0x4 1 0x12"}, "5m", "6m", "12m", {**OF_WORKER, "tier": "disk"},
         "the disk tier of w:9401 takes no writes"),
    Case("KvasirDiskSetAside", {of_coordinator("kv_disk_set_aside"): "0x4 1x5 0x9"},
         {of_coordinator("kv_disk_set_aside"): "0x4 1x1 0x12"}, "6m", "7m", "12m", OF_COORDINATOR,
         "the disk tier of c:9400 does not answer and is not read"),
    once("kv_read_errors_total", ',tier="disk"', alert="KvasirDiskReadErrors", labels={"tier": "disk"}, minutes=15,
         summary="the drive of w:9401 failed reads"),
    Case("KvasirDiskSlow", {of_worker("kv_writes_dropped_total", ',tier="disk",reason="busy"'): "0+6x30 180x30"},
         {of_worker("kv_writes_dropped_total", ',tier="disk",reason="read_only"'): "0+6x60"}, "14m", "18m", "45m",
         {**OF_WORKER, "tier": "disk", "reason": "busy"}, "the drive of w:9401 is slower than what is to be stored"),
    Case("KvasirDiskWear",
         {of_worker("kv_disk_written_bytes_total"): "0+1x300 300x200", of_worker("kv_tier_bytes", ',tier="disk"'): "300x500"},
         {of_worker("kv_disk_written_bytes_total"): "0+0.6x500", of_worker("kv_tier_bytes", ',tier="disk"'): "300x500"},
         "280m", "300m", "450m", {"instance": "w:9401", "rank": "0"},
         "w:9401 wrote 300B in six hours: more than three times its disk tier a day"),
]

QUALITY = [
    Case("KvasirMassContractMissed",
         {of_worker("mass_contract_total", ',outcome="missed"'): "0+2x30 60x30",
          of_worker("mass_contract_total", ',outcome="kept"'): "0+98x60"},
         {of_worker("mass_contract_total", ',outcome="missed"'): "0+1x60",
          of_worker("mass_contract_total", ',outcome="dense"'): "0+9x60",
          of_worker("mass_contract_total", ',outcome="kept"'): "0+90x60"},
         "10m", "12m", "37m", {"model_name": "m"},
         "2% of the selections of m keep less mass than promised"),
]

CASES = AVAILABILITY + LATENCY + KV + DISK + QUALITY
