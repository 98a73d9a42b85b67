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

}  // namespace

void SendCopy(PeerNode& node, PeerLink link, PeerMessage kind, std::string body) {
  const auto kept = std::make_shared<const std::string>(std::move(body));
  node.Send(link, PeerHeader{.kind = kind}.bytes(),
            {reinterpret_cast<const std::byte*>(kept->data()), kept->size()}, [kept] {});
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
    Lend(node, id, link, wanted);
  }
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
           secret_->Proof(GroupSecret::Side::kLender, link.nonces) + fingerprint_);
}

void PeerLender::WarnUnproven() {
  const Clock::time_point now = Clock::now();
  if (now < next_warning_) return;
  next_warning_ = now + kWarningInterval;
  spdlog::warn(
      "a peer that asks for blocks does not prove the secret; give all replicas the same "
      "--peer-secret-file");
}

void PeerLender::Lend(PeerNode& node, PeerLink id, Link& link, const WantedBlock& wanted) {
  const auto say = [&node, id, ticket = wanted.ticket](PeerMessage kind) {
    node.Send(id, PeerHeader{.kind = kind, .ticket = ticket}.bytes(), {}, nullptr);
  };
  const std::optional<kvstore::LentBlocks::Lent> lent = blocks_.Find(wanted.hash);
  if (!lent.has_value()) {
    say(PeerMessage::kAbsent);
    return;
  }
  ++link.sending;
  node.Send(id, PeerHeader{.kind = PeerMessage::kBlock, .ticket = wanted.ticket}.bytes(),
            lent->extent, [this, id, hash = wanted.hash, given = *lent, say] {
              --links_.at(id).sending;
              if (!blocks_.IsStillLent(hash, given.number)) {
                say(PeerMessage::kGone);
                return;
              }
              ++lent_blocks_;
              lent_bytes_ += static_cast<int64_t>(given.extent.size());
              say(PeerMessage::kWhole);
            });
}

void PeerLender::OnTick(PeerNode& node) {
  const Clock::time_point now = Clock::now();
  for (const auto& [id, link] : links_) {
    if (link.is_proven || now < link.prove_by) continue;
    node.Close(id, absl::UnauthenticatedError("the peer proves no secret in time"));
  }
}

}  // namespace kvasir::worker
