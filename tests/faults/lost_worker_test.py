"""Workers are killed and stopped, and bits of their memory flip, while streams run; every stream ends as in a clean run,
token by token.

    lost_worker_test.py                                 # the short form: 40 faults
    lost_worker_test.py --kills=500 --stops=200         # the long form, with times of recovery
    lost_worker_test.py --kills=400 --stops=0 --flips=100  # 10,000 flipped bits
    lost_worker_test.py --seed=7 --context=8000 --model=FOLDER
"""

from runs import FaultRuns

QUEST = ["--sparse-selector=quest", "--sparse-token-budget=256", "--sparse-window-tokens=64", "--sparse-sink-tokens=64"]


class LostWorkers(FaultRuns):
    def kinds(self):
        """The faults of one of the four runs."""
        kills, stops = self.options.kills // 4, self.options.stops // 4
        alls = flips = kills // 4
        return ["all"] * alls + ["flip"] * flips + ["kill"] * (kills - alls - flips) + ["stop"] * stops

    def test_one_rank(self):
        self.play("one rank", self.kinds(), ranks=1, seed=self.options.seed)

    def test_two_ranks(self):
        self.play("two ranks", self.kinds(), ranks=2, seed=self.options.seed + 1)

    def test_one_rank_with_a_disk_and_sparse_attention(self):
        self.play("one rank, disk, quest", self.kinds(), ranks=1, seed=self.options.seed + 2, flags=QUEST, disk_gb=1)

    def test_two_ranks_with_a_disk(self):
        self.play("two ranks, disk", self.kinds(), ranks=2, seed=self.options.seed + 3, disk_gb=1)


if __name__ == "__main__":
    LostWorkers.main(__doc__, [("--kills", 36, "SIGKILLs, of one rank or of all, in four runs"),
                               ("--stops", 4, "SIGSTOPs for longer than the rank timeout"),
                               ("--flips", 20, "bits of a killed worker's memory that flip in one fault of that kind")])
