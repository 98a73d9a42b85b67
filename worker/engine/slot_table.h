// The sequences of a worker by slot, and their blocks in the KV store. It carries out the
// bookkeeping parts of a plan and checks every field first: plans come from our own coordinator,
// but a wrong one must end as an error and never as corrupted KV. It hides how slots, blocks and
// tokens refer to each other. Called by the engine, in the order of a plan's fields.
// Thread-compatible.
//
// Errors: INTERNAL, naming the field, for a plan that contradicts the worker's state; the group
// cannot go on after it. RESOURCE_EXHAUSTED from Prepare concerns its row only. A sequence whose
// numbers no selector can work with starts as failed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/strong_id.h"
#include "kvstore/kv_store.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/batch/sequence.h"

namespace kvasir::worker {

// Returns the numbers of one part of a policy.
kernels::PolicyNumbers NumbersOf(const v1::AttentionPolicy& policy);

// A policy that the server declared, and its selectors.
struct PolicyShape {
  v1::AttentionPolicy prefill, decode;
  int64_t prefill_selector = 0;  // index into the engine's selectors
  int64_t decode_selector = 0;
  bool decode_is_dense = true;  // then a prompt has no tail
};

struct SlotTableOptions {
  int64_t num_slots = 0;
  int64_t max_model_len = 0;
  int64_t vocab_size = 0;
  int64_t pages_per_block = 0;
  int64_t num_layers = 0;
  std::vector<int64_t> layer_windows = {};  // ModelConfig::layer_windows
  std::vector<PolicyShape> policies = {};
};

// Tokens of a sequence's reused prefix, by the tier that held them at its start.
struct CachedPrefix {
  int64_t device_tokens = 0;
  int64_t host_tokens = 0;
  int64_t disk_tokens = 0;  // restored for this sequence
  int64_t peer_tokens = 0;  // likewise, from a peer
};

class SlotTable {
 public:
  // `store` outlives the table.
  SlotTable(SlotTableOptions options, kvstore::KvStore& store);

  absl::Status Seal(const v1::BlockSeal& seal);
  absl::Status Free(uint32_t slot);
  absl::Status Persist(const v1::BlockPersist& persist);
  absl::Status Erase(const v1::Erase& erase);
  void Export(const v1::BlockExport& block) {
    store_.Export(block.id(), kernels::BlockId(static_cast<int64_t>(block.block_id())));
  }
  // Returns the store's status, or an error if the plan is wrong.
  absl::Status Import(const v1::BlockImport& block);
  absl::Status PinDisk(const v1::StepPlan& plan);
  void Drop(kernels::BlockId block) { store_.Drop(block); }
  // Returns the store's status, or an error if the plan is wrong.
  absl::Status Restore(const v1::BlockRestore& restore);
  // Returns the blocks that the plan's starts name and this rank does not hold.
  std::vector<kernels::BlockId> FindMissing(const v1::StepPlan& plan) const;
  absl::StatusOr<CachedPrefix> Start(const v1::SequenceStart& start);

  // Truncates the sequence to the row's begin, opens its new blocks, and returns the work. Appends
  // to `truncations`.
  absl::StatusOr<RowWork> Prepare(const v1::StepRow& row, std::vector<Truncation>& truncations);

  // Whether no row of the slot may be prepared: its numbers are wrong, or an earlier row found no
  // room.
  bool IsLeftOut(uint32_t slot) const;

  // REQUIRES: the slot is taken.
  Sequence& at(int64_t slot);
  // Null when the slot is not taken (or does not exist).
  const Sequence* Find(uint32_t slot) const;
  // Sum over all sequences. Bytes.
  int64_t selection_memory_bytes() const;

 private:
  struct OpenBlock {
    int64_t slot = 0;
    int64_t index = 0;  // in the sequence
  };

  absl::Status CheckStart(const v1::SequenceStart& start) const;
  absl::Status CheckRow(const v1::StepRow& row, const Sequence& sequence) const;
  absl::Status Truncate(int64_t slot, int64_t length, std::vector<Truncation>& truncations);
  absl::Status OpenBlocks(const v1::StepRow& row, Sequence& sequence);
  void UnbindFrom(int64_t slot, int64_t first_index);

  const SlotTableOptions options_;
  kvstore::KvStore& store_;
  std::vector<std::optional<Sequence>> slots_;
  std::map<kernels::BlockId, OpenBlock> open_blocks_;  // bound and not sealed
};

}  // namespace kvasir::worker
