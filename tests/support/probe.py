"""Asks as the kubelet does: exit code 0 when the answer is good.

    probe.py http URL TIMEOUT              status 200 to 399
    probe.py grpc HOST:PORT SERVICE TIMEOUT  SERVING of grpc.health.v1.Health
"""

import sys
import urllib.error
import urllib.request

SERVING = b"\x08\x01"  # HealthCheckResponse{status}


def http(url, timeout_s):
    try:
        with urllib.request.urlopen(url, timeout=timeout_s):
            return "ok"
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {error.read().decode().strip()}")
    except OSError as error:
        sys.exit(str(error))


def health(address, service, timeout_s):
    import grpc
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""  # HealthCheckRequest{service}
    with grpc.insecure_channel(address) as channel:
        try:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=timeout_s)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
    if answer != SERVING:
        sys.exit("not serving")


if __name__ == "__main__":
    if sys.argv[1] == "http":
        http(sys.argv[2], float(sys.argv[3]))
    else:
        health(sys.argv[2], sys.argv[3], float(sys.argv[4]))
