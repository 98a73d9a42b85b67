// The end of links that lends: gives sealed blocks of the host tier to workers of other replicas
// that prove the peers' secret. It holds nothing meanwhile: a block that gives way while it is sent
// is told afterwards (kGone). A borrower of another degree wants a part of the heads, which is
// copied first. Used by the peer tier. Runs on the node's thread, except the counts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"
#include "kvstore/peers/lent_blocks.h"
#include "kvstore/peers/peer_node.h"
#include "proto/security/group_secret.h"
#include "worker/peers/part_memory.h"
#include "worker/peers/peer_messages.h"

namespace kvasir::worker {

class PeerLender {
 public:
  // `blocks` and `format`, theirs, outlive the lender.
  PeerLender(kvstore::LentBlocks& blocks, const kvstore::ExtentFormat& format,
             std::shared_ptr<const proto::GroupSecret> secret)
      : blocks_(blocks), format_(format), secret_(std::move(secret)) {}

  // As PeerHandler.
  void OnLink(kvstore::PeerNode& node, kvstore::PeerLink link);
  bool Has(kvstore::PeerLink link) const { return links_.contains(link); }
  std::optional<absl::Span<std::byte>> PlaceOf(kvstore::PeerLink link, const PeerHeader& header,
                                               size_t body_bytes);
  void OnMessage(kvstore::PeerNode& node, kvstore::PeerLink link, const PeerHeader& header,
                 absl::Span<const std::byte> body);
  void OnLost(kvstore::PeerLink link) { links_.erase(link); }
  void OnTick(kvstore::PeerNode& node);

  // Any thread.
  int64_t lent_blocks() const { return lent_blocks_; }
  int64_t lent_bytes() const { return lent_bytes_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    proto::GroupSecret::Nonces nonces;
    Clock::time_point prove_by;
    bool is_proven = false;
    int64_t sending = 0;       // number of blocks, with those to be copied
    int64_t copied_bytes = 0;  // of those that are sent
    std::deque<WantedBlock> to_copy = {};
    std::vector<std::byte> body;  // of the message that is received
  };

  void TakeProof(kvstore::PeerNode& node, kvstore::PeerLink id, Link& link, absl::string_view body);
  void WarnUnproven();
  void Lend(kvstore::PeerNode& node, kvstore::PeerLink id, Link& link, const WantedBlock& wanted);
  // Sends what waits to be copied, as far as there is room for copies.
  void LendCopies(kvstore::PeerNode& node, kvstore::PeerLink id, Link& link);
  // Copies the wanted heads; null when the block is not lent, or damaged.
  std::shared_ptr<const PartMemory::Part> Copy(const WantedBlock& wanted);
  void Say(kvstore::PeerNode& node, kvstore::PeerLink id, PeerMessage kind, uint64_t ticket) const;
  void Count(absl::Span<const std::byte> extent);

  kvstore::LentBlocks& blocks_;
  const kvstore::ExtentFormat& format_;
  const std::shared_ptr<const proto::GroupSecret> secret_;
  PartMemory memory_;
  absl::flat_hash_map<kvstore::PeerLink, Link> links_;
  Clock::time_point next_warning_{};
  std::atomic<int64_t> lent_blocks_ = 0;
  std::atomic<int64_t> lent_bytes_ = 0;
};

// Returns the body of kWelcome.
std::string Welcome(const std::string& proof, const kvstore::ExtentFormat& format);
// Sends a message whose body lives as long as it takes.
void SendCopy(kvstore::PeerNode& node, kvstore::PeerLink link, PeerMessage kind, std::string body);

}  // namespace kvasir::worker
