// The end of links that borrows: asks workers of other replicas for blocks, one replica after the
// other, and reaches them again when they were away. A peer that has some of this rank's KV heads
// is asked for those, and others for the rest. What comes is not verified here. A block ends when
// no link touches its memory any more, so that nothing of a slow peer ever arrives late. Used by
// the peer tier. Runs on the node's thread, except num_linked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/format/head_extent.h"
#include "kvstore/format/page_format.h"
#include "kvstore/peers/peer_node.h"
#include "kvstore/tiers/tier.h"
#include "proto/security/group_secret.h"
#include "worker/peers/part_memory.h"
#include "worker/peers/peer_messages.h"

namespace kvasir::worker {

// The address of a peer called HOST:PORT, as numbers. May ask name servers, and take long.
absl::StatusOr<std::string> ResolvePeer(const std::string& name);

struct PeerBorrowerOptions {
  std::vector<std::string> peers;  // HOST:PORT; this process's own address is left out
  std::shared_ptr<const proto::GroupSecret> secret;
  // A peer that was asked and is silent for so long is given up: what it was asked for is computed.
  std::chrono::milliseconds patience{2000};
  // Time until a link must be ready.
  std::chrono::milliseconds greeting{5000};
  // Pause before a peer is tried again; doubles while it cannot be reached. A peer that is refused,
  // or sent wrong bytes, is left alone for the longest.
  std::chrono::milliseconds first_pause{500};
  std::chrono::milliseconds longest_pause{30'000};
  // Most bytes that one peer is asked for at a time, and at least one block.
  int64_t window_bytes = int64_t{64} << 20;
  // Called on any thread, perhaps beyond the borrower's end. Tests have one that waits.
  std::function<absl::StatusOr<std::string>(const std::string& name)> resolve = ResolvePeer;
};

class PeerBorrower {
 public:
  // Some heads of a block, as a peer sent them.
  struct Part {
    kvstore::HeadRange heads;
    size_t peer = 0;
    // Their extent (HeadExtent). Null: it is the whole block, in the place of the read.
    std::shared_ptr<const PartMemory::Part> memory = nullptr;
  };
  // OK: `parts` has all heads of the block as peers sent them. NOT_FOUND: for some heads no peer
  // has it. UNAVAILABLE: a peer that may have it failed. Called on the node's thread.
  using OnEnd = std::function<void(const kvstore::TierRead& read, std::vector<Part> parts,
                                   const absl::Status& status)>;

  // `format`, of the blocks, outlives the borrower.
  PeerBorrower(PeerBorrowerOptions options, const kvstore::ExtentFormat& format, OnEnd on_end);

  // As PeerHandler.
  void OnStart(kvstore::PeerNode& node) { node_ = &node; }
  bool Has(kvstore::PeerLink link) const { return by_link_.contains(link); }
  std::optional<absl::Span<std::byte>> PlaceOf(kvstore::PeerLink link, const PeerHeader& header,
                                               size_t body_bytes);
  void OnMessage(kvstore::PeerLink link, const PeerHeader& header,
                 absl::Span<const std::byte> body);
  void OnLost(kvstore::PeerLink link, const absl::Status& why);
  void OnTick();

  // Fetches blocks, each with a ticket of its own.
  void Read(std::vector<kvstore::TierRead> reads);
  // A peer sent other bytes than were sealed.
  void OnWrongBytes(size_t peer, const absl::Status& why);

  // Any thread.
  int64_t num_linked() const { return num_linked_; }
  int64_t num_peers() const { return static_cast<int64_t>(options_.peers.size()); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    enum class State { kAway, kLookedUp, kGreeting, kReady, kSelf };

    std::string name;
    State state = State::kAway;
    kvstore::PeerLink link;
    proto::GroupSecret::Nonces nonces;
    std::string greeting;    // body of the message that is received
    Clock::time_point next;  // kAway: when it is tried again. kGreeting: when it must be ready
    std::chrono::milliseconds pause{0};
    std::string told;           // the last failure that was logged
    Clock::time_point heard{};  // from it, or asked when nothing was outstanding
    int64_t outstanding = 0;    // number of blocks and parts that it was asked for
    int64_t outstanding_bytes = 0;
    kvstore::HeadRange heads;  // that it has. kReady: some of them are this rank's
    std::future<absl::StatusOr<std::string>> address;  // of its name, while it is looked up
  };
  struct Block {
    kvstore::TierRead read;
    size_t parts_left = 0;  // that have not ended
    absl::Status status;    // of a part that failed
    std::vector<Part> parts;
  };
  struct Fetch {
    uint64_t block = 0;  // ticket of its read
    Part part;           // its peer: asked now, or to be asked next
    bool is_asked = false;
    bool has_place = false;                   // its body is on its way
    bool is_here = false;                     // its body has come
    std::optional<PeerMessage> outcome = {};  // kWhole, kGone, kAbsent
    bool has_failed = false;                  // a peer may have it, and did not give it
  };

  void Connect(size_t index);
  void OpenTo(size_t index, const absl::StatusOr<std::string>& address);
  void SetAway(Peer& peer, const absl::Status& why);
  void TakeHello(Peer& peer, absl::string_view body);
  void TakeWelcome(Peer& peer, absl::string_view body);
  void OnOutcome(Peer& peer, const PeerHeader& header);
  // Ends the fetch, or hands it to the next peer, once the peer has said what became of it and
  // nothing of it is on its way.
  void Settle(uint64_t ticket, Fetch& fetch);
  void AskNext(uint64_t ticket, Fetch& fetch);
  void Ask();
  void AddFetch(const Fetch& fetch);
  // Leaves to the fetch the heads that its peer has, and makes fetches of the others.
  void Split(uint64_t ticket);
  // Whether the peer can be asked for some of the heads.
  bool MayAsk(const Peer& peer, const kvstore::HeadRange& heads) const;
  void End(uint64_t ticket, const absl::Status& status);
  int64_t BytesOf(const kvstore::HeadRange& heads) const;
  bool HasRoom(const Peer& peer, int64_t bytes) const;
  void SendWants(std::vector<std::vector<WantedBlock>> by_peer);

  const PeerBorrowerOptions options_;
  const kvstore::ExtentFormat& format_;
  const kvstore::HeadRange heads_;  // of this rank
  const OnEnd on_end_;
  PartMemory memory_;
  kvstore::PeerNode* node_ = nullptr;
  std::vector<Peer> peers_;
  absl::flat_hash_map<kvstore::PeerLink, size_t> by_link_;
  absl::flat_hash_map<uint64_t, Block> blocks_;  // by the ticket of the read
  uint64_t next_ticket_ = 0;
  absl::flat_hash_map<uint64_t, Fetch> fetches_;  // by the ticket that peers are told
  std::deque<uint64_t> waiting_;                  // tickets of fetches that are to be asked for
  std::atomic<int64_t> num_linked_ = 0;
};

}  // namespace kvasir::worker
