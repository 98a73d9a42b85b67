// Moves blocks of an engine's KV to a disk tier and back, for tests: the requests that the
// coordinator would make.
#pragma once

#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {

// Computes the request in chunks of `chunk` tokens, and stores the first `count` blocks of its
// prompt. `hashes` gets their prefix hashes.
inline void ComputeAndStore(TestWorker& worker, const TestRequest& request, int64_t chunk,
                            size_t count, std::vector<std::string>& hashes) {
  TestCoordinator coordinator({.chunk = chunk, .keep_blocks = true});
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  v1::StepPlan plan = coordinator.NextPlan();
  for (size_t i = 0; i < count; ++i) {
    v1::BlockPersist& persist = *plan.add_persists();
    persist.set_block_id(coordinator.result(r).blocks[i]);
    hashes.push_back(TestCoordinator::HashOfBlock(persist.block_id()));
    for (size_t t = 0; t < 64; ++t) persist.add_tokens(request.prompt[64 * i + t]);
  }
  const auto reply = worker.engine().Step(plan);
  ASSERT_TRUE(reply.ok()) << reply.status();
  worker.engine().FlushTier();
}

// Reads them as blocks `first_id` and following. Returns what the engine reports.
inline v1::TierReport RestoreBlocks(TestWorker& worker, TestCoordinator& coordinator,
                                    const std::vector<std::string>& hashes, uint64_t first_id) {
  v1::StepPlan plan = coordinator.NextPlan();
  for (size_t i = 0; i < hashes.size(); ++i) {
    v1::BlockRestore& restore = *plan.add_restores();
    restore.set_block_id(first_id + i);
    restore.set_prefix_hash(hashes[i]);
  }
  const auto reply = worker.engine().Step(plan);
  EXPECT_TRUE(reply.ok()) << reply.status();
  while (worker.engine().TierIsBusy()) worker.engine().PollTier();
  return worker.engine().TakeTierReport();
}

}  // namespace kvasir::worker
