"""The network between a service and its workers is cut, slow, or late, while streams run; every stream ends as in a clean run, token
by token. Every worker is on a host of its own: a network namespace (tests/support/hosts.py).

    lost_network_test.py                                # the short form
    lost_network_test.py --partitions=200 --delays=200  # the long form
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from runs import FaultRuns
from support.hosts import Hosts


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


if __name__ == "__main__":
    LostNetworks.main(__doc__, [("--partitions", 4, "cuts for longer than the rank timeout"),
                                ("--delays", 4, "cuts for less than it, and 200 kbit/s for longer")])
