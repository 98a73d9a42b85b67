#include "worker/peers/peer_lender.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace kvasir::worker {
namespace {

using kvstore::PeerLink;
using kvstore::PeerNode;
using proto::GroupSecret;

// Links that prove nothing for so long end.
constexpr std::chrono::seconds kProofPatience(5);
constexpr std::chrono::seconds kWarningInterval(60);
// More links than this are not served: each replica has one.
constexpr size_t kMostLinks = 256;
// Blocks on their way over one link. A borrower that asks for more at a time is none of ours.
constexpr int64_t kMostSending = 4096;
// Most bytes of copies on their way over one link, and at least one copy.
constexpr int64_t kMostCopiedBytes = int64_t{16} << 20;

}  // namespace

void SendCopy(PeerNode& node, PeerLink link, PeerMessage kind, std::string body) {
  const auto kept = std::make_shared<const std::string>(std::move(body));
  node.Send(link, PeerHeader{.kind = kind}.bytes(),
            {reinterpret_cast<const std::byte*>(kept->data()), kept->size()}, [kept] {});
}

std::string Welcome(const std::string& proof, const kvstore::ExtentFormat& format) {
  const WireHeads heads = WireHeads::Of(kvstore::HeadsOf(format.shard()));
  return absl::StrCat(proof,
                      absl::string_view(reinterpret_cast<const char*>(&heads), sizeof(heads)),
                      format.FingerprintOfAnyHeads());
}

void PeerLender::OnLink(PeerNode& node, PeerLink id) {
  if (links_.size() >= kMostLinks) {
    node.Close(id, absl::ResourceExhaustedError(absl::StrCat("more than ", kMostLinks, " links")));
    return;
  }
  Link& link = links_[id];
  link.nonces.worker = GroupSecret::NewNonce();
  link.prove_by = Clock::now() + kProofPatience;
  SendCopy(node, id, PeerMessage::kHello, link.nonces.worker);
}

std::optional<absl::Span<std::byte>> PeerLender::PlaceOf(PeerLink id, const PeerHeader& header,
                                                         size_t body_bytes) {
  Link& link = links_.at(id);
  const bool is_proof = header.kind == PeerMessage::kProof && !link.is_proven;
  const bool is_want = header.kind == PeerMessage::kWant && link.is_proven;
  if (!link.body.empty() || body_bytes == 0) return std::nullopt;  // one at a time
  if (!(is_proof && body_bytes <= kMostGreetingBytes) &&
      !(is_want && body_bytes <= kMostWantedBlocks * sizeof(WantedBlock))) {
    return std::nullopt;
  }
  link.body.resize(body_bytes);
  return absl::MakeSpan(link.body);
}

void PeerLender::OnMessage(PeerNode& node, PeerLink id, const PeerHeader& header,
                           absl::Span<const std::byte> /*body*/) {
  Link& link = links_.at(id);
  const std::vector<std::byte> body = std::exchange(link.body, {});
  if (header.kind == PeerMessage::kProof) {
    TakeProof(node, id, link, {reinterpret_cast<const char*>(body.data()), body.size()});
    return;
  }
  const size_t count = body.size() / sizeof(WantedBlock);
  if (body.size() % sizeof(WantedBlock) != 0 ||
      link.sending + static_cast<int64_t>(count) > kMostSending) {
    node.Close(id, absl::InvalidArgumentError(absl::StrCat("blocks are asked for in ", body.size(),
                                                           " bytes, beside ", link.sending)));
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    WantedBlock wanted;
    std::memcpy(&wanted, body.data() + i * sizeof(wanted), sizeof(wanted));
    if (wanted.heads.count == 0 ||
        kvstore::Common(wanted.heads.range(), kvstore::HeadsOf(format_.shard())) !=
            wanted.heads.range()) {
      node.Close(id, absl::InvalidArgumentError(absl::StrCat(
                         "it asks for ", wanted.heads.count, " KV heads from ", wanted.heads.first,
                         ", this worker has ", format_.Fingerprint())));
      return;
    }
    Lend(node, id, link, wanted);
  }
  LendCopies(node, id, link);
}

void PeerLender::TakeProof(PeerNode& node, PeerLink id, Link& link, absl::string_view body) {
  link.nonces.coordinator = std::string(body.substr(0, GroupSecret::kNonceBytes));
  const absl::string_view proof = body.substr(link.nonces.coordinator.size());
  if (!secret_->Proves(GroupSecret::Side::kBorrower, link.nonces, proof)) {
    WarnUnproven();
    node.Close(id, absl::UnauthenticatedError("the peer does not prove the secret"));
    return;
  }
  link.is_proven = true;
  SendCopy(node, id, PeerMessage::kWelcome,
           Welcome(secret_->Proof(GroupSecret::Side::kLender, link.nonces), format_));
}

void PeerLender::WarnUnproven() {
  const Clock::time_point now = Clock::now();
  if (now < next_warning_) return;
  next_warning_ = now + kWarningInterval;
  spdlog::warn(
      "a peer that asks for blocks does not prove the secret; give all replicas the same "
      "--peer-secret-file");
}

void PeerLender::Say(PeerNode& node, PeerLink id, PeerMessage kind, uint64_t ticket) const {
  node.Send(id, PeerHeader{.kind = kind, .ticket = ticket}.bytes(), {}, nullptr);
}

void PeerLender::Count(absl::Span<const std::byte> extent) {
  ++lent_blocks_;
  lent_bytes_ += static_cast<int64_t>(extent.size());
}

void PeerLender::Lend(PeerNode& node, PeerLink id, Link& link, const WantedBlock& wanted) {
  const std::optional<kvstore::LentBlocks::Lent> lent = blocks_.Find(wanted.hash);
  if (!lent.has_value()) {
    Say(node, id, PeerMessage::kAbsent, wanted.ticket);
    return;
  }
  ++link.sending;
  if (wanted.heads.range() != kvstore::HeadsOf(format_.shard())) {
    link.to_copy.push_back(wanted);
    return;
  }
  node.Send(id, PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket}.bytes(),
            lent->extent, [this, &node, id, wanted, given = *lent] {
              --links_.at(id).sending;
              const bool is_whole = blocks_.IsStillLent(wanted.hash, given.number);
              if (is_whole) Count(given.extent);
              Say(node, id, is_whole ? PeerMessage::kWhole : PeerMessage::kGone, wanted.ticket);
            });
}

void PeerLender::LendCopies(PeerNode& node, PeerLink id, Link& link) {
  while (!link.to_copy.empty() && link.copied_bytes < kMostCopiedBytes) {
    const WantedBlock wanted = link.to_copy.front();
    link.to_copy.pop_front();
    const std::shared_ptr<const PartMemory::Part> copy = Copy(wanted);
    if (copy == nullptr) {
      --link.sending;
      Say(node, id, PeerMessage::kAbsent, wanted.ticket);
      continue;
    }
    const absl::Span<const std::byte> extent = copy->bytes();
    link.copied_bytes += static_cast<int64_t>(extent.size());
    node.Send(id, PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket}.bytes(), extent,
              [this, &node, id, ticket = wanted.ticket, copy] {
                Link& sent = links_.at(id);
                --sent.sending;
                sent.copied_bytes -= static_cast<int64_t>(copy->bytes().size());
                Count(copy->bytes());
                Say(node, id, PeerMessage::kWhole, ticket);
                LendCopies(node, id, sent);
              });
  }
}

std::shared_ptr<const PartMemory::Part> PeerLender::Copy(const WantedBlock& wanted) {
  const absl::StatusOr<kvstore::HeadExtent> heads =
      kvstore::HeadExtent::Create(format_, wanted.heads.range());
  if (!heads.ok()) return nullptr;
  const absl::StatusOr<std::shared_ptr<const PartMemory::Part>> part =
      memory_.Take(heads->format().extent_bytes());
  if (!part.ok()) return nullptr;
  absl::Status status;
  const bool is_lent = blocks_.Read(wanted.hash, [&](absl::Span<const std::byte> extent) {
    // The copy's sections get checksums of their own, so damage must be found here. Pages keep
    // theirs: the borrower finds it.
    const absl::StatusOr<kvstore::BlockIdentity> block = format_.ReadSections(extent);
    status = block.status();
    if (status.ok()) heads->Gather(*block, extent, (*part)->bytes());
  });
  if (!status.ok()) spdlog::error("a block is not lent to a peer: {}", status.ToString());
  return is_lent && status.ok() ? *part : nullptr;
}

void PeerLender::OnTick(PeerNode& node) {
  const Clock::time_point now = Clock::now();
  for (const auto& [id, link] : links_) {
    if (link.is_proven || now < link.prove_by) continue;
    node.Close(id, absl::UnauthenticatedError("the peer proves no secret in time"));
  }
}

}  // namespace kvasir::worker
