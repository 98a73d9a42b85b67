// Engines of all ranks of a group, each on its own thread, over real sockets. For tests of what
// ranks do together, and of one rank as a group of one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/parallel/relay.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"
#include "worker/parallel/gloo_collective.h"

namespace kvasir::worker {

struct RankGroupOptions {
  TestWorkerOptions model;  // without the rank
  int size = 1;
  EngineOptions engine = TestWorker::DefaultOptions();
  std::string disk_path = "";  // empty: no disk tier
  absl::Duration timeout = absl::Seconds(20);
};

class RankGroup {
 public:
  explicit RankGroup(const RankGroupOptions& options) {
    Relay relay(options.size);
    ranks_.resize(static_cast<size_t>(options.size));
    OnAllRanks([&](int rank) {
      Rank& r = ranks_[static_cast<size_t>(rank)];
      TestWorkerOptions model = options.model;
      model.rank = rank;
      model.num_ranks = options.size;
      r.model = std::make_unique<TestModel>(model);
      r.collective = Connect(options, rank, relay);
      r.worker = std::make_unique<TestWorker>(*r.model, *r.collective, options.engine,
                                              Disk(options, r.model->transformer()));
    });
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  TestWorker& worker(int rank) { return *ranks_[static_cast<size_t>(rank)].worker; }
  // Ends the rank as if its process were killed: its sockets close.
  void Kill(int rank) { ranks_[static_cast<size_t>(rank)].collective.reset(); }

  std::vector<absl::StatusOr<v1::StepReply>> Step(const v1::StepPlan& plan) {
    std::vector<absl::StatusOr<v1::StepReply>> replies(ranks_.size());
    OnAllRanks([&](int rank) {
      if (ranks_[static_cast<size_t>(rank)].collective == nullptr) return;
      replies[static_cast<size_t>(rank)] = worker(rank).engine().Step(plan);
    });
    return replies;
  }

  // Sends each plan to all ranks, whose answers must agree, until every request is done. Accounting
  // is summed over the ranks.
  void Run(TestCoordinator& coordinator) {
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      const auto replies = Step(plan);
      for (const auto& reply : replies) {
        ASSERT_TRUE(reply.ok()) << reply.status();
        EXPECT_EQ(reply->token_hash(), replies[0]->token_hash());
      }
      v1::StepReply merged = *replies[0];
      for (size_t rank = 1; rank < replies.size(); ++rank) {
        for (int i = 0; i < merged.results_size(); ++i) {
          TestCoordinator::AddAccounting(replies[rank]->results(i).accounting(),
                                         *merged.mutable_results(i)->mutable_accounting());
        }
      }
      ASSERT_NO_FATAL_FAILURE(coordinator.Apply(plan, merged));
      for (int rank = 0; rank < size(); ++rank) {
        const absl::Status integrity = worker(rank).engine().store().CheckIntegrity();
        ASSERT_TRUE(integrity.ok()) << integrity;
      }
    }
  }

 private:
  struct Rank {
    std::unique_ptr<TestModel> model;
    std::unique_ptr<Collective> collective;
    std::unique_ptr<TestWorker> worker;
  };

  static std::unique_ptr<Collective> Connect(const RankGroupOptions& options, int rank,
                                             Relay& relay) {
    if (options.size == 1) return std::make_unique<SingleCollective>();
    return GlooCollective::Connect({.rank = rank, .size = options.size, .timeout = options.timeout},
                                   relay.rank(rank))
        .value();
  }

  static std::unique_ptr<kvstore::Tier> Disk(const RankGroupOptions& options,
                                             const Transformer& model) {
    v1::KvConfig config;
    config.set_kv_disk_path(options.disk_path);
    config.set_kv_disk_size_gb(1);
    return OpenDisk({.config = config,
                     .shard = KvShardOf(options.engine, model),
                     .kv_replicas = model.options().shard.kv_replicas})
        .value();
  }

  void OnAllRanks(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<Rank> ranks_;
};

}  // namespace kvasir::worker
