#include "worker/peers/peer_tier.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/head_extent.h"
#include "kvstore/peers/lent_blocks.h"
#include "kvstore/peers/peer_node.h"
#include "kvstore/peers/socket_address.h"
#include "proto/process/work_thread.h"
#include "worker/peers/peer_borrower.h"
#include "worker/peers/peer_lender.h"

namespace kvasir::worker {
namespace {

using kernels::MutexLock;
using kvstore::BlockIdentity;
using kvstore::ExtentFormat;
using kvstore::PeerLink;
using kvstore::PeerNode;
using kvstore::PrefixHash;
using kvstore::StoredBlock;
using kvstore::Tier;
using kvstore::TierCompletion;
using kvstore::TierEvents;
using kvstore::TierRead;
using kvstore::TierStats;
using kvstore::TierWrite;

class PeerTierImpl final : public PeerTier, private kvstore::PeerHandler {
 public:
  PeerTierImpl(const PeerTierOptions& options, const ExtentFormat& format,
               std::unique_ptr<Tier> disk)
      : format_(format),
        disk_(std::move(disk)),
        lender_(lent_, format_, options.secret),
        borrower_(
            {.peers = options.peers, .secret = options.secret, .patience = options.patience},
            format_,
            [this](const TierRead& read, std::vector<PeerBorrower::Part> parts,
                   const absl::Status& status) { OnFetched(read, std::move(parts), status); }),
        verifier_("verify", [this](const Arrived& arrived) { Verify(arrived); }) {}
  ~PeerTierImpl() override;

  absl::Status Start(const PeerTierOptions& options);

  const std::string& address() const override { return node_->address(); }
  kvstore::LentBlocks* lent_blocks() override { return &lent_; }
  void Write(std::vector<TierWrite> writes) override EXCLUDES(mu_);
  void Read(std::vector<TierRead> reads) override;
  void Pin(absl::Span<const kvstore::PrefixHash> blocks) override {
    if (disk_ != nullptr) disk_->Pin(blocks);
  }
  void Unpin(absl::Span<const kvstore::PrefixHash> blocks) override {
    if (disk_ != nullptr) disk_->Unpin(blocks);
  }
  bool Erase(kvstore::TierErase erase) override {
    return disk_ != nullptr && disk_->Erase(std::move(erase));
  }
  TierEvents Poll() override EXCLUDES(mu_);
  void Wait() override {
    if (disk_ != nullptr) disk_->Wait();
  }
  bool ExpectsBlocks() const override { return disk_ != nullptr && disk_->ExpectsBlocks(); }
  const ExtentFormat& format() const override { return format_; }
  bool Holds(const PrefixHash& hash) const override {
    return disk_ != nullptr && disk_->Holds(hash);
  }
  bool MayRead(const PrefixHash& hash) const override {
    return borrower_.num_linked() > 0 || Holds(hash);
  }
  std::unique_ptr<kvstore::HeldExtent> Hold(const PrefixHash& hash) override {
    return disk_ == nullptr ? nullptr : disk_->Hold(hash);
  }
  std::unique_ptr<kvstore::IoQueue> NewReadQueue() override {
    return disk_ == nullptr ? nullptr : disk_->NewReadQueue();
  }
  void ForgetDamaged(const PrefixHash& hash, absl::StatusCode why) override {
    if (disk_ != nullptr) disk_->ForgetDamaged(hash, why);
  }
  std::vector<StoredBlock> Inventory() const override {
    return disk_ == nullptr ? std::vector<StoredBlock>() : disk_->Inventory();
  }
  uint64_t first_generation() const override {
    return disk_ == nullptr ? 1 : disk_->first_generation();
  }
  TierStats stats() const override EXCLUDES(mu_);

 private:
  struct Arrived {
    TierRead read;
    std::vector<PeerBorrower::Part> parts;
  };

  // As PeerHandler, on the node's thread. A link is the lender's or the borrower's.
  void OnStart(PeerNode& node) override {
    caller_ = &node;
    borrower_.OnStart(node);
  }
  void OnLink(PeerLink link) override { lender_.OnLink(*caller_, link); }
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink link, absl::Span<const std::byte> header,
                                               size_t body_bytes) override;
  void OnMessage(PeerLink link, absl::Span<const std::byte> header,
                 absl::Span<std::byte> body) override;
  void OnLost(PeerLink link, const absl::Status& why) override {
    lender_.OnLost(link);
    borrower_.OnLost(link, why);
  }
  void OnTick() override;

  void OnFetched(const TierRead& read, std::vector<PeerBorrower::Part> parts,
                 const absl::Status& status) EXCLUDES(mu_);
  void Verify(const Arrived& arrived) EXCLUDES(mu_);
  // Verifies a block's parts and puts them together. The peer of one that is wrong hears of it.
  absl::StatusOr<BlockIdentity> Join(const Arrived& arrived);
  absl::StatusOr<BlockIdentity> JoinPart(const PeerBorrower::Part& part,
                                         const TierRead& read) const;

  const ExtentFormat format_;
  const std::unique_ptr<Tier> disk_;  // null: none
  kvstore::LentBlocks lent_;
  PeerLender lender_;
  PeerBorrower borrower_;
  PeerNode* caller_ = nullptr;  // node_, from its first callback on: before Create returns

  mutable kernels::Mutex mu_;
  std::vector<TierCompletion> completions_ GUARDED_BY(mu_);
  kvstore::PeerStats counts_ GUARDED_BY(mu_);  // of what was fetched

  proto::WorkThread<Arrived> verifier_;
  std::unique_ptr<PeerNode> node_;
};

absl::Status PeerTierImpl::Start(const PeerTierOptions& options) {
  const absl::StatusOr<kvstore::HostPort> at = kvstore::SplitHostPort(options.listen);
  if (!at.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--peer-listen ", at.status().message()));
  }
  kvstore::PeerNodeOptions node;
  node.host = at->host;
  node.port = at->port;
  node.transports = options.transports;
  KVASIR_ASSIGN_OR_RETURN(node_, PeerNode::Create(node, *this));
  return absl::OkStatus();
}

PeerTierImpl::~PeerTierImpl() {
  verifier_.Stop();  // it uses the node
  node_.reset();     // from here on no memory of others is touched
}

// --- the engine's thread ------------------------------------------------------------------------

void PeerTierImpl::Write(std::vector<TierWrite> writes) {
  if (disk_ != nullptr) {
    disk_->Write(std::move(writes));
    return;
  }
  MutexLock lock(mu_);
  for (const TierWrite& write : writes) {
    completions_.push_back({.ticket = write.ticket,
                            .status = absl::UnavailableError("there is no disk tier"),
                            .block = {}});
  }
}

void PeerTierImpl::Read(std::vector<TierRead> reads) {
  // Peers give whole extents; fronts are read of blocks that the disk holds.
  const auto at_peers =
      std::stable_partition(reads.begin(), reads.end(), [this](const TierRead& read) {
        return Holds(read.hash) || std::ssize(read.extent) < format_.extent_bytes();
      });
  std::vector<TierRead> rest(at_peers, reads.end());
  reads.erase(at_peers, reads.end());
  if (!reads.empty()) disk_->Read(std::move(reads));
  if (rest.empty()) return;
  node_->Post([this, rest = std::move(rest)] { borrower_.Read(rest); });
}

TierEvents PeerTierImpl::Poll() {
  TierEvents events = disk_ == nullptr ? TierEvents() : disk_->Poll();
  MutexLock lock(mu_);
  for (TierCompletion& completion : std::exchange(completions_, {})) {
    events.completions.push_back(std::move(completion));
  }
  return events;
}

TierStats PeerTierImpl::stats() const {
  TierStats stats = disk_ == nullptr ? TierStats() : disk_->stats();
  {
    MutexLock lock(mu_);
    stats.peers = counts_;
  }
  stats.peers.configured = borrower_.num_peers();
  stats.peers.linked = borrower_.num_linked();
  stats.peers.lent_blocks = lender_.lent_blocks();
  stats.peers.lent_bytes = lender_.lent_bytes();
  return stats;
}

// --- the node's thread --------------------------------------------------------------------------

std::optional<absl::Span<std::byte>> PeerTierImpl::PlaceOf(PeerLink link,
                                                           absl::Span<const std::byte> bytes,
                                                           size_t body_bytes) {
  const std::optional<PeerHeader> header = ReadPeerHeader(bytes);
  if (!header.has_value()) return std::nullopt;
  if (lender_.Has(link)) return lender_.PlaceOf(link, *header, body_bytes);
  if (borrower_.Has(link)) return borrower_.PlaceOf(link, *header, body_bytes);
  return std::nullopt;
}

void PeerTierImpl::OnMessage(PeerLink link, absl::Span<const std::byte> bytes,
                             absl::Span<std::byte> body) {
  const std::optional<PeerHeader> header = ReadPeerHeader(bytes);  // PlaceOf has seen it
  if (lender_.Has(link)) {
    lender_.OnMessage(*caller_, link, *header, body);
  } else {
    borrower_.OnMessage(link, *header, body);
  }
}

void PeerTierImpl::OnTick() {
  lender_.OnTick(*caller_);
  borrower_.OnTick();
}

void PeerTierImpl::OnFetched(const TierRead& read, std::vector<PeerBorrower::Part> parts,
                             const absl::Status& status) {
  if (status.ok()) {
    verifier_.Add({.read = read, .parts = std::move(parts)});
    return;
  }
  MutexLock lock(mu_);
  ++(absl::IsNotFound(status) ? counts_.absent_blocks : counts_.failed_blocks);
  completions_.push_back({.ticket = read.ticket, .status = status, .block = {}, .from_peer = true});
}

// --- the verifier -------------------------------------------------------------------------------

void PeerTierImpl::Verify(const Arrived& arrived) {
  const absl::StatusOr<BlockIdentity> block = Join(arrived);
  MutexLock lock(mu_);
  if (block.ok()) {
    ++counts_.fetched_blocks;
    counts_.fetched_bytes += format_.extent_bytes();
  } else {
    ++counts_.refused_blocks;
  }
  completions_.push_back({.ticket = arrived.read.ticket,
                          .status = block.status(),
                          .block = block.ok() ? *block : BlockIdentity(),
                          .from_peer = true});
}

absl::StatusOr<BlockIdentity> PeerTierImpl::Join(const Arrived& arrived) {
  absl::StatusOr<BlockIdentity> whole = absl::DataLossError("it has no parts");
  for (const PeerBorrower::Part& part : arrived.parts) {
    absl::StatusOr<BlockIdentity> block = JoinPart(part, arrived.read);
    if (block.ok() && whole.ok() && block->tokens != whole->tokens) {
      block = absl::DataLossError("it has other tokens than the other heads' part");
    }
    if (!block.ok()) {
      spdlog::error("a block from a peer is refused: {}", block.status().ToString());
      node_->Post(
          [this, peer = part.peer, why = block.status()] { borrower_.OnWrongBytes(peer, why); });
      return block.status();
    }
    if (!whole.ok()) whole = block;
  }
  // The parts may be of different sealings: the header is that of this extent alone.
  if (arrived.parts.size() > 1) format_.WriteHeader(*whole, arrived.read.extent);
  return whole;
}

absl::StatusOr<BlockIdentity> PeerTierImpl::JoinPart(const PeerBorrower::Part& part,
                                                     const TierRead& read) const {
  KVASIR_ASSIGN_OR_RETURN(const kvstore::HeadExtent heads,
                          kvstore::HeadExtent::Create(format_, part.heads));
  const absl::Span<const std::byte> extent =
      part.memory == nullptr ? read.extent : part.memory->bytes();
  const absl::StatusOr<BlockIdentity> block = heads.format().ReadHeader(extent);
  if (!block.ok()) return absl::DataLossError(block.status().message());
  if (block->hash != read.hash) return absl::DataLossError("it is another block");
  KVASIR_RETURN_IF_ERROR(heads.format().Verify(*block, extent));
  if (part.memory != nullptr) heads.Scatter(extent, read.extent);
  return block;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerTier>> PeerTier::Create(const PeerTierOptions& options,
                                                           std::unique_ptr<Tier> disk) {
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format, ExtentFormat::Create(options.shard));
  auto tier = std::make_unique<PeerTierImpl>(options, format, std::move(disk));
  KVASIR_RETURN_IF_ERROR(tier->Start(options));
  return std::unique_ptr<PeerTier>(std::move(tier));
}

}  // namespace kvasir::worker
