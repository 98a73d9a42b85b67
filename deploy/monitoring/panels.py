"""The panels of the dashboard, as rows of questions: what make_dashboard.py writes for Grafana and draw_dashboard.py draws.

Each query is PromQL with a legend in Grafana's form. $model is the dashboard's variable.
"""

import dataclasses
from typing import Tuple

MODEL = 'model_name=~"$model"'


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    question: str
    unit: str  # Grafana's: short, s, percentunit, reqps, bytes, Bps
    queries: Tuple[Tuple[str, str], ...]


def rate(name, by, more=""):
    return f"sum by ({by}) (rate(kvasir_{name}{{{MODEL}{more}}}[$__rate_interval]))"


def gauge(name, by, more=""):
    return f"sum by ({by}) (kvasir_{name}{{{MODEL}{more}}})"


def recorded(name):
    return f"model_name:kvasir_{name}{{{MODEL}}}"


CLIENTS = (
    Panel("Time to first token", "Do clients wait for the first token?", "s",
          ((recorded("time_to_first_token_seconds:p50_5m"), "p50"), (recorded("time_to_first_token_seconds:p99_5m"), "p99"))),
    Panel("Between tokens", "Do answers flow?", "s",
          ((recorded("inter_token_latency_seconds:p50_5m"), "p50"), (recorded("inter_token_latency_seconds:p99_5m"), "p99"))),
    Panel("Tokens", "How much is read and written?", "short",
          ((rate("prompt_tokens_total", "model_name"), "prompt tokens/s"),
           (rate("generation_tokens_total", "model_name"), "generated tokens/s"))),
    Panel("Requests that ended", "How do requests end?", "reqps",
          ((rate("request_success_total", "finished_reason"), "{{finished_reason}}"),)),
    Panel("Requests refused", "Who is turned away, and why?", "reqps",
          ((rate("requests_rejected_total", "reason"), "{{reason}}"),)),
    Panel("Length of prompts", "How long are the documents?", "short",
          tuple((f"histogram_quantile({q}, {rate('request_prompt_tokens_bucket', 'le')})", name)
                for q, name in ((0.5, "p50"), (0.9, "p90")))),
)

QUEUE = (
    Panel("Requests", "Is there a queue?", "short",
          ((gauge("num_requests_running", "instance"), "running {{instance}}"),
           (gauge("num_requests_waiting", "instance"), "waiting {{instance}}"),
           (gauge("num_requests_read_elsewhere", "instance"), "read elsewhere {{instance}}"))),
    Panel("Time in the queue", "How long is one request in ten kept waiting?", "s",
          ((recorded("request_queue_time_seconds:p90_5m"), "p90"),)),
    Panel("Waiting prompt tokens", "How much work is queued?", "short",
          ((gauge("num_waiting_prompt_tokens", "instance"), "{{instance}}"),)),
    Panel("Time by part of a request", "Where does the time go?", "s",
          tuple((f"{rate(f'request_{part}_time_seconds_sum', 'model_name')} / "
                 f"{rate(f'request_{part}_time_seconds_count', 'model_name')}", part)
                for part in ("queue", "prefill", "decode"))),
    Panel("Steps", "Are steps slow?", "s",
          tuple((f"histogram_quantile({q}, {rate('step_seconds_bucket', 'rank, le')})", name + " rank {{rank}}")
                for q, name in ((0.5, "p50"), (0.99, "p99"))) +
          ((f"histogram_quantile(0.99, {rate('step_gap_seconds_bucket', 'rank, le')})", "gap before, p99 rank {{rank}}"),)),
    Panel("Tokens of a step", "Are steps full?", "short",
          ((f"{rate('step_tokens_sum', 'rank')} / {rate('step_tokens_count', 'rank')}", "mean rank {{rank}}"),)),
)

CACHE = (
    Panel("KV held by running requests", "Is there room for KV?", "percentunit",
          ((gauge("kv_cache_usage_perc", "instance"), "{{instance}}"),)),
    Panel("Prefix cache", "Does the prefix cache help?", "percentunit",
          ((recorded("prefix_cache_hits:ratio_5m"), "hit rate"),)),
    Panel("Prompt tokens found, by tier", "Which tier answers?", "short",
          ((rate("prompt_tokens_cached_by_source_total", "source"), "{{source}}"),)),
    Panel("Preemptions", "Do answers outgrow the host tier?", "short",
          ((rate("num_preemptions_total", "kind"), "{{kind}}"),)),
    Panel("Pages of the tiers", "How full are the tiers?", "short",
          ((gauge("kv_tier_pages", "tier, state"), "{{tier}} {{state}}"),)),
    Panel("Pages found in the device tier", "Do steps wait for pages?", "percentunit",
          ((recorded("kv_page_hits:ratio_5m"), "{{tier}} hit rate"),)),
    Panel("KV moved between tiers", "How busy are bus and drive?", "Bps",
          ((rate("kv_transfer_bytes_total", "from, to"), "{{from}} to {{to}}"),)),
    Panel("Trouble of the tiers", "Is the disk well?", "short",
          ((rate("kv_page_checksum_failures_total", "tier"), "checksums {{tier}}"),
           (rate("kv_read_errors_total", "tier"), "read errors {{tier}}"),
           (rate("kv_writes_dropped_total", "reason"), "writes dropped: {{reason}}"))),
    Panel("Written to disk", "How much does the drive wear?", "Bps",
          ((rate("kv_disk_written_bytes_total", "rank"), "rank {{rank}}"),)),
    Panel("Blocks at peers", "Do peers help?", "short",
          ((rate("peer_blocks_total", "result"), "{{result}}"), (gauge("peers", "state"), "peers {{state}}"),
           (gauge("peers_set_aside", "instance"), "set aside by {{instance}}"))),
)

ATTENTION = (
    Panel("Pages skipped", "How sparse is attention?", "percentunit",
          ((recorded("attention_blocks_skipped:ratio_5m"), "{{phase}}"),)),
    Panel("Pages skipped, by reason", "Which part of a policy saves?", "short",
          ((rate("attention_blocks_skipped_total", "reason"), "{{reason}}"),)),
    Panel("Tokens attended to", "How much does a query read?", "short",
          tuple((f"histogram_quantile({q}, {rate('attention_budget_tokens_bucket', 'le')})", name)
                for q, name in ((0.5, "p50"), (0.99, "p99")))),
    Panel("Attention mass kept", "How much attention mass is kept?", "percentunit",
          tuple((f"histogram_quantile({q}, {rate('attention_mass_kept_ratio_bucket', 'phase, le')})", name + " {{phase}}")
                for q, name in ((0.01, "p1"), (0.5, "p50")))),
    Panel("Contracts of quality", "Is the contract of quality kept?", "short",
          ((rate("mass_contract_total", "outcome"), "{{outcome}}"),)),
    Panel("Selections reused", "Do reuse rules save anything?", "short",
          ((rate("mask_refresh_total", "kind"), "{{kind}}"),)),
)

PROCESSES = (
    Panel("Ranks", "Are all ranks there?", "short", ((gauge("worker_up", "instance, rank"), "{{instance}} rank {{rank}}"),)),
    Panel("Groups lost, rows failed", "Did anything fail?", "short",
          ((f"increase(kvasir_worker_group_losses_total{{{MODEL}}}[$__rate_interval])", "groups of {{instance}}"),
           (f"sum by (code) (increase(kvasir_failed_rows_total{{{MODEL}}}[$__rate_interval]))", "rows: {{code}}"))),
    Panel("Requests moved to other servers", "Does a drain lose requests?", "short",
          ((f"sum by (instance, result) (increase(kvasir_requests_moved_total{{{MODEL}}}[$__rate_interval]))", "{{result}} {{instance}}"),)),
    Panel("Connections", "Are connections at their bound?", "short",
          (("sum by (job, instance) (kvasir_connections)", "{{job}} {{instance}}"),
           ("sum by (job, reason) (rate(kvasir_connections_refused_total[$__rate_interval]))", "refused by {{job}}: {{reason}}"))),
    Panel("Time until certificates expire", "How long do certificates serve?", "s",
          (("min by (job, instance, role) (kvasir_tls_certificate_expiry_timestamp_seconds) - time()", "{{role}} of {{job}} {{instance}}"),)),
)

ROWS = (
    ("Clients", CLIENTS),
    ("Queue and steps", QUEUE),
    ("KV", CACHE),
    ("Attention", ATTENTION),
    ("Processes", PROCESSES),
)
