#!/usr/bin/env python3
"""Prints metrics of one process, coordinator or worker. Exits with 1 and names the metrics that it does not serve.

    deploy/print_metrics.py HOST:PORT METRIC [METRIC ...]
    deploy/print_metrics.py --tls-ca-file=ca.crt HOST:PORT METRIC [METRIC ...]     a server with TLS
"""

import argparse
import ssl
import sys
import urllib.request


def read_metrics(address, options):
    """The lines of a process's /metrics. TLS is spoken where a CA is given, as the commands of kvasir do."""
    if not options.tls_ca_file:
        context, scheme = None, "http"
    else:
        context, scheme = ssl.create_default_context(cafile=options.tls_ca_file), "https"
        if options.tls_cert_file:
            context.load_cert_chain(options.tls_cert_file, options.tls_key_file)
    with urllib.request.urlopen(f"{scheme}://{address}/metrics", context=context) as reply:
        return reply.read().decode().splitlines()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls-ca-file", help="PEM of the CA by which the server is known; without it TLS is not spoken")
    parser.add_argument("--tls-cert-file", help="PEM of a certificate to show, for a server that asks for one")
    parser.add_argument("--tls-key-file", help="its private key")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("wanted", metavar="METRIC", nargs="+")
    options = parser.parse_args()
    try:
        lines = read_metrics(options.address, options)
    except OSError as error:
        sys.exit(f"print_metrics: {options.address}: {error}")
    missing = []
    for name in options.wanted:
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        print("\n".join(found) if found else f"{name}: not served")
        if not found:
            missing.append(name)
    if missing:
        sys.exit(f"print_metrics: {options.address} does not serve {', '.join(missing)}")


if __name__ == "__main__":
    main()
