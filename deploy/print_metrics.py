#!/usr/bin/env python3
"""Prints metrics of one process, coordinator or worker. Exits with 1 and names the metrics that it does not serve.

    deploy/print_metrics.py HOST:PORT METRIC [METRIC ...]
"""

import sys
import urllib.request


def main(address, *wanted):
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    missing = []
    for name in wanted:
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        print("\n".join(found) if found else f"{name}: not served")
        if not found:
            missing.append(name)
    if missing:
        sys.exit(f"print_metrics: {address} does not serve {', '.join(missing)}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
