"""The coordinator is killed while streams run, and another one starts at its address; clients ask it to go on, and every stream
ends as in a clean run, token by token. Workers, which the test started, keep their blocks meanwhile.

    lost_coordinator_test.py                    # the short form
    lost_coordinator_test.py --coordinators=200 # the long form
"""

from runs import FaultRuns


class LostCoordinators(FaultRuns):
    def test_one_rank(self):
        self.play("one rank", ["coordinator"] * (self.options.coordinators // 2), ranks=1, seed=self.options.seed)

    def test_two_ranks_with_a_disk_beside_killed_workers(self):
        coordinators = self.options.coordinators // 2
        self.play("two ranks, disk", ["coordinator"] * coordinators + ["kill"] * (coordinators // 2), ranks=2,
                  seed=self.options.seed + 1, disk_gb=1)


if __name__ == "__main__":
    LostCoordinators.main(__doc__, [("--coordinators", 8, "SIGKILLs of the coordinator, in two runs; a quarter as many of a worker")])
