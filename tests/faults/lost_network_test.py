"""The network between a service and its workers is cut, slow, or late, while streams run; every stream ends as in a clean run, token
by token. Every worker is on a host of its own: a network namespace (tests/support/hosts.py).

    lost_network_test.py                                # the short form
    lost_network_test.py --partitions=200 --delays=200  # the long form
"""

import pathlib
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from group import Group
from runs import FLAGS, FaultRuns
from support.hosts import Hosts
from support.tiny_model import make_tiny_model

FORGOTTEN_S = 4  # of a cut: the kernel of a killed coordinator has long given its connections up


class LostNetworks(FaultRuns):
    def test_two_ranks(self):
        with Hosts() as hosts:
            late = self.options.delays // 2
            if not hosts.shapes_traffic():
                print("tc shapes no traffic here: links are cut and never slow", flush=True)
                late = self.options.delays
            hosts.enter_node()
            kinds = ["partition"] * self.options.partitions + ["delay"] * late + ["slow"] * (self.options.delays - late)
            self.play("two hosts", kinds, ranks=2, seed=self.options.seed, hosts=hosts)

    # Once, the worker waited for that coordinator for ever, and refused another one.
    def test_a_worker_that_never_hears_of_the_end_of_its_coordinator(self):
        with Hosts() as hosts, tempfile.TemporaryDirectory(prefix="kvasir-faults-") as folder:
            hosts.enter_node()
            with Group(make_tiny_model(pathlib.Path(folder) / "model"), 1, FLAGS, hosts=hosts) as group:
                cut = threading.Thread(target=group.cut, args=(0, lambda: time.sleep(FORGOTTEN_S)))
                begun = time.monotonic()
                cut.start()
                group.kill_coordinator()  # returns when another one serves
                took = time.monotonic() - begun
                cut.join()
                log = (group.folder / "worker-0.log").read_text()
        self.assertGreater(took, FORGOTTEN_S)
        self.assertEqual(log.count("stream ended"), 1, log)
        print(f"a link that is back after {FORGOTTEN_S} s: the worker has its next coordinator after {took:.1f} s", flush=True)
        self.assertLess(took, FORGOTTEN_S + 8)  # a probe after 1 s, and the coordinator's next attempt


if __name__ == "__main__":
    LostNetworks.main(__doc__, [("--partitions", 4, "cuts for longer than the rank timeout"),
                                ("--delays", 4, "cuts for less than it, and 200 kbit/s for longer")])
