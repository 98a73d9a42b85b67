"""The Markdown tables of peer_llama_cpp.py, from the runs it measured."""

import statistics

BUDGET = 1024  # tokens that a sparse policy selects


def reference_of(side, rows):
    """Returns the fastest value in each column of the peers that a side of ours is compared with; none for a peer."""
    peers = {"kvasir-bf16": ("llama-f16", "llama-bf16"), "kvasir-int8": ("llama-q8_0",)}.get(side, ())
    found = [rows[peer, "dense"] for peer in peers if (peer, "dense") in rows]
    return tuple(min(column) for column in zip(*found)) if found else None


def cell(value, factor, digits, reference):
    if value is None:
        return "", ""
    return f"{factor * value:.{digits}f}", f"{value / reference:.2f}" if reference else ""


def stream_table(results, flash):
    """Returns Markdown lines for one stream: `results` by length, then by (side, policy)."""
    lines = ["| prompt | side | policy | reads, s | ratio | a token, ms | tokens/s | ratio |", "|---|---|---|---|---|---|---|---|"]
    for tokens, by_side in results.items():
        rows = {key: (statistics.median(run.read for run in runs), statistics.median(run.token for run in runs))
                for key, runs in by_side.items()}
        for (side, policy), (read, token) in rows.items():
            reference = reference_of(side, rows)
            reads = cell(read if policy == "dense" else None, 1, 3, reference and reference[0])
            each = cell(token, 1e3, 2, reference and reference[1])
            setting = f"flash {flash[side, tokens, 1]}" if (side, tokens, 1) in flash else named(policy)
            lines.append(f"| {tokens:,} | {side} | {setting} | {reads[0]} | {reads[1]} | {each[0]} | {1 / token:.1f} "
                         f"| {each[1]} |")
    return lines


def streams_table(results, streams, flash):
    """Returns the same for several streams. The ratio of tokens per second is theirs over ours: below 1 we are faster."""
    lines = [f"| {streams} prompts of | side | policy | all read, s | ratio | tokens/s, all | ratio |",
             "|---|---|---|---|---|---|---|"]
    for tokens, by_side in results.items():
        rows = {key: (statistics.median(run[0] for run in runs), 1 / statistics.median(run[1] for run in runs))
                for key, runs in by_side.items()}
        for (side, policy), (read, token) in rows.items():
            reference = reference_of(side, rows)
            reads = cell(read if policy == "dense" else None, 1, 3, reference and reference[0])
            ratio = cell(token, 1, 4, reference and reference[1])[1]
            setting = f"flash {flash[side, tokens, streams]}" if (side, tokens, streams) in flash else named(policy)
            lines.append(f"| {tokens:,} | {side} | {setting} | {reads[0]} | {reads[1]} | {1 / token:.1f} | {ratio} |")
    return lines


def named(policy):
    return policy if policy == "dense" else f"{policy} {BUDGET:,}"
