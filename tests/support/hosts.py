"""Hosts and containers without a cluster: network namespaces joined by a bridge, and a root of overlayfs for each container.

    with Hosts() as hosts:
        host = hosts.add("10.77.0.11")
        container = Container(host, root, ["kvasir", "serve"], {"NAME": "value"}, mounts={...})

A container is what a pod's is: process 1 of its own, user 10001 without capabilities, a root that it cannot write except for
its volumes. Nothing of it is seen outside: no address of this machine's own network is used. Needs root, iproute2 and
overlayfs; the test is skipped where one of them is missing.
"""

import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

NODE = "10.77.0.1"  # where the kubelet asks from
USER = "10001"

# $1 scratch folder, $2 hosts file, $3 the root below, then SOURCE=TARGET for each mount (tmpfs=TARGET: an empty volume), '--', NAME=VALUE
# and the command. The container's root is a layer of its own over the root below, and is then read-only.
START = r"""
set -e
scratch=$1; hosts=$2; below=$3; shift 3
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch"/upper "$scratch"/work "$scratch"/root
mount -t overlay overlay -o lowerdir="$below",upperdir="$scratch"/upper,workdir="$scratch"/work "$scratch"/root
root="$scratch"/root
mount --rbind /dev "$root"/dev
mount -t proc proc "$root"/proc
while [ "$1" != -- ]; do
  target="$root${1#*=}"
  mkdir -p "$target"
  case "$1" in
    tmpfs=*) mount -t tmpfs -o mode=1777 tmpfs "$target" ;;
    *) mount --bind "${1%%=*}" "$target"; mount -o remount,ro,bind "$target" ;;
  esac
  shift
done
shift
touch "$root"/etc/hosts
mount --bind "$hosts" "$root"/etc/hosts
mount -o remount,ro "$root"
cd "$root"
exec chroot "$root" setpriv --reuid USER --regid USER --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
  env -i PATH=/usr/local/bin:/usr/bin:/bin "$@"
""".replace("USER", USER)


def call(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)


class Hosts:
    """A bridge in a namespace of its own, which is the node of the kubelet, and hosts that hang on it."""

    def __init__(self):
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "setpriv"))):
            raise unittest.SkipTest("network namespaces need root and the programs ip, unshare and setpriv")
        self.name = f"kvasir{os.getpid()}"
        self.names = []
        try:
            self.node = self.namespace("node")
        except subprocess.CalledProcessError as error:
            raise unittest.SkipTest(f"no network namespaces here: {error.stderr.strip()}") from None
        call("ip", "-n", self.node, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", self.node, "addr", "add", f"{NODE}/24", "dev", "bridge")
        call("ip", "-n", self.node, "link", "set", "bridge", "up")
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-hosts-")
        self.hosts_file = pathlib.Path(self.folder.name) / "hosts"
        self.addresses = {}
        self.write_hosts()

    def namespace(self, part):
        name = f"{self.name}-{part}"
        call("ip", "netns", "add", name)
        self.names.append(name)
        call("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def add(self, address):
        """Adds a host; returns its namespace."""
        number = len(self.names)
        host = self.namespace(number)
        call("ip", "-n", self.node, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", host)
        call("ip", "-n", self.node, "link", "set", f"port{number}", "master", "bridge", "up")
        call("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        call("ip", "-n", host, "link", "set", "eth0", "up")
        return host

    def port(self, host):
        """The node's end of a host's cable."""
        return f"port{self.names.index(host)}"

    def shapes_traffic(self):
        """Whether this kernel lets `tc` make a cable slow."""
        if not shutil.which("tc"):
            return False
        shape = ["qdisc", "add", "dev", "bridge", "root", "tbf", "rate", "1mbit", "burst", "16kbit", "latency", "400ms"]
        if subprocess.run(["tc", "-n", self.node, *shape], capture_output=True, check=False).returncode != 0:
            return False
        call("tc", "-n", self.node, "qdisc", "del", "dev", "bridge", "root")
        return True

    def enter_node(self):
        """Brings this process, with all that it starts from now on, to the node. Call it before there are threads."""
        with open(f"/run/netns/{self.node}", "rb") as node:
            if ctypes.CDLL(None, use_errno=True).setns(node.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def call_it(self, name, address):
        """Gives an address a name, in place of the one that it had."""
        self.addresses[name] = address
        self.write_hosts()

    def write_hosts(self):
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        self.hosts_file.write_text("\n".join(lines) + "\n")  # the same file: containers have it mounted

    def on_node(self, *command, **options):
        return subprocess.run(["ip", "netns", "exec", self.node, *map(str, command)], capture_output=True, text=True,
                              check=False, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in reversed(self.names):
            call("ip", "netns", "del", name)
        self.folder.cleanup()


class Container:
    def __init__(self, hosts, host, command, environment, mounts, root="/"):
        """`mounts`: folders of this machine, or "tmpfs", by their place in the container; `root`: that of the image."""
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-container-")
        scratch = pathlib.Path(self.folder.name) / "scratch"
        scratch.mkdir()
        self.log_path = pathlib.Path(self.folder.name) / "log"
        words = [*(f"{source}={target}" for target, source in mounts.items()), "--",
                 *(f"{name}={value}" for name, value in environment.items()), *command]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", host, "unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", START,
                 "container", str(scratch), str(hosts.hosts_file), str(root), *words], stdout=log, stderr=subprocess.STDOUT)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def first_process(self):
        """Process 1 of the container, as this machine sees it; None when it has ended."""
        path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split() if path.exists() else []
        return int(children[0]) if children else None

    def signal(self, number):
        os.kill(self.first_process(), number)

    def execute(self, *command):
        """Runs a command in the container, as `exec` probes and hooks do; returns its exit code."""
        enter = ["nsenter", f"--target={self.first_process()}", "--mount", "--pid", "--net", "--root", "--wd"]
        return subprocess.run([*enter, "setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", *command], check=False).returncode

    def wait(self, timeout_s):
        return self.process.wait(timeout_s)

    def close(self):
        if self.process.poll() is None:
            try:
                self.signal(signal.SIGKILL)
            except (TypeError, ProcessLookupError):
                self.process.kill()
            self.process.wait(20)
        self.folder.cleanup()


def wait_until(condition, timeout_s, what):
    """Polls; AssertionError with the last answer after the time."""
    deadline = time.monotonic() + timeout_s
    answer = condition()
    while not answer:
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.2)
        answer = condition()
    return answer
