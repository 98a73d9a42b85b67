#include "worker/peers/peer_borrower.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/peers/socket_address.h"
#include "proto/process/named_thread.h"
#include "worker/peers/peer_lender.h"

namespace kvasir::worker {
namespace {

using kvstore::PeerLink;
using proto::GroupSecret;

constexpr size_t kProofBytes = 32;

// Another try soon would end alike.
bool IsRefusal(const absl::Status& why) {
  return absl::IsFailedPrecondition(why) || absl::IsUnauthenticated(why) || absl::IsDataLoss(why) ||
         absl::IsInvalidArgument(why);
}

}  // namespace

absl::StatusOr<std::string> ResolvePeer(const std::string& name) {
  KVASIR_ASSIGN_OR_RETURN(const kvstore::HostPort at, kvstore::SplitHostPort(name));
  KVASIR_ASSIGN_OR_RETURN(const kvstore::SocketAddress address, kvstore::Resolve(at.host, at.port));
  return address.ToString();
}

PeerBorrower::PeerBorrower(PeerBorrowerOptions options, const kvstore::ExtentFormat& format,
                           OnEnd on_end)
    : options_(std::move(options)),
      format_(format),
      heads_(kvstore::HeadsOf(format.shard())),
      on_end_(std::move(on_end)),
      peers_(options_.peers.size()) {
  for (size_t i = 0; i < peers_.size(); ++i) peers_[i].name = options_.peers[i];
}

// --- links --------------------------------------------------------------------------------------

void PeerBorrower::OnTick() {
  const Clock::time_point now = Clock::now();
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.state == Peer::State::kAway && now >= peer.next) Connect(i);
    if (peer.state == Peer::State::kLookedUp &&
        peer.address.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      OpenTo(i, peer.address.get());
    }
    if (peer.state == Peer::State::kGreeting && now >= peer.next) {
      node_->Close(peer.link, absl::UnavailableError("it does not greet in time"));
    }
    if (peer.outstanding > 0 && now >= peer.heard + options_.patience) {
      node_->Close(peer.link, absl::UnavailableError(absl::StrCat(
                                  "silent for ", options_.patience.count(), " ms while ",
                                  peer.outstanding, " blocks are asked for")));
    }
  }
}

// Names are looked up on a thread of their own, which may take long: it owns all that it uses, and
// nobody waits for it when the borrower ends.
void PeerBorrower::Connect(size_t index) {
  Peer& peer = peers_[index];
  if (kvstore::ParseAddress(peer.name).ok()) {
    OpenTo(index, peer.name);
    return;
  }
  std::packaged_task<absl::StatusOr<std::string>()> task(
      [resolve = options_.resolve, name = peer.name] { return resolve(name); });
  peer.address = task.get_future();
  peer.state = Peer::State::kLookedUp;
  try {
    proto::NamedThread("resolve", std::move(task)).detach();
  } catch (const std::system_error& error) {
    SetAway(peer,
            absl::UnavailableError(absl::StrCat("no thread looks up its name: ", error.what())));
  }
}

void PeerBorrower::OpenTo(size_t index, const absl::StatusOr<std::string>& address) {
  Peer& peer = peers_[index];
  if (address.ok() && *address == node_->address()) {
    peer.state = Peer::State::kSelf;
    return;
  }
  const absl::StatusOr<PeerLink> link =
      address.ok() ? node_->Open(*address) : absl::StatusOr<PeerLink>(address.status());
  if (!link.ok()) {
    SetAway(peer, link.status());
    return;
  }
  peer.link = *link;
  peer.nonces = {};
  peer.state = Peer::State::kGreeting;
  peer.next = Clock::now() + options_.greeting;
  by_link_[*link] = index;
}

void PeerBorrower::SetAway(Peer& peer, const absl::Status& why) {
  peer.state = Peer::State::kAway;
  peer.pause = IsRefusal(why)
                   ? options_.longest_pause
                   : std::clamp(2 * peer.pause, options_.first_pause, options_.longest_pause);
  peer.next = Clock::now() + peer.pause;
  const std::string words(why.message());
  if (std::exchange(peer.told, words) != words) {
    spdlog::warn("peer {}: {}; tried again from time to time", peer.name, words);
  }
}

void PeerBorrower::OnLost(PeerLink link, const absl::Status& why) {
  const auto lost = by_link_.extract(link);
  if (!lost) return;
  Peer& peer = peers_[lost.mapped()];
  if (peer.state == Peer::State::kReady) --num_linked_;
  peer.outstanding = peer.outstanding_bytes = 0;
  peer.greeting.clear();
  SetAway(peer, why);
  std::vector<uint64_t> tickets;
  int64_t begun = 0;
  for (const auto& [ticket, fetch] : fetches_) {
    if (!fetch.is_asked || fetch.part.peer != lost.mapped()) continue;
    tickets.push_back(ticket);
    if (fetch.has_place) ++begun;
  }
  if (!tickets.empty()) {
    spdlog::warn("peer {}: lost with {} blocks asked for, {} of them begun", peer.name,
                 tickets.size(), begun);
  }
  std::sort(tickets.begin(), tickets.end());
  for (const uint64_t ticket : tickets) {
    Fetch& fetch = fetches_.at(ticket);
    fetch.has_failed = true;
    AskNext(ticket, fetch);
  }
  Ask();
}

std::optional<absl::Span<std::byte>> PeerBorrower::PlaceOf(PeerLink link, const PeerHeader& header,
                                                           size_t body_bytes) {
  Peer& peer = peers_[by_link_.at(link)];
  peer.heard = Clock::now();
  if (peer.state == Peer::State::kGreeting) {
    if (!peer.greeting.empty() || body_bytes == 0 || body_bytes > kMostGreetingBytes) {
      return std::nullopt;
    }
    peer.greeting.resize(body_bytes);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(peer.greeting.data()), body_bytes);
  }
  if (header.kind != PeerMessage::kBlock) {
    if (body_bytes > 0) return std::nullopt;
    return absl::Span<std::byte>();
  }
  const auto it = fetches_.find(header.ticket);
  if (it == fetches_.end()) return std::nullopt;
  Fetch& fetch = it->second;
  const bool is_whole = fetch.part.heads == heads_;
  if (!fetch.is_asked || &peers_[fetch.part.peer] != &peer || fetch.has_place ||
      static_cast<int64_t>(body_bytes) != BytesOf(fetch.part.heads)) {
    return std::nullopt;
  }
  fetch.has_place = true;
  if (is_whole) return blocks_.at(fetch.block).read.extent;
  const auto memory = memory_.Take(BytesOf(fetch.part.heads));
  if (!memory.ok()) return std::nullopt;
  fetch.part.memory = *memory;
  return fetch.part.memory->bytes();
}

void PeerBorrower::OnMessage(PeerLink link, const PeerHeader& header,
                             absl::Span<const std::byte> body) {
  Peer& peer = peers_[by_link_.at(link)];
  peer.heard = Clock::now();
  switch (header.kind) {
    case PeerMessage::kHello:
    case PeerMessage::kWelcome:
      if (peer.state == Peer::State::kGreeting) {
        const std::string words = std::exchange(peer.greeting, {});
        header.kind == PeerMessage::kHello ? TakeHello(peer, words) : TakeWelcome(peer, words);
        return;
      }
      break;
    case PeerMessage::kBlock:
    case PeerMessage::kWhole:
    case PeerMessage::kGone:
    case PeerMessage::kAbsent:
      if (peer.state == Peer::State::kReady) {
        OnOutcome(peer, header);
        return;
      }
      break;
    case PeerMessage::kProof:
    case PeerMessage::kWant:
      break;
  }
  node_->Close(link, absl::FailedPreconditionError(
                         absl::StrCat("it sent message ", static_cast<uint32_t>(header.kind),
                                      " with ", body.size(), " bytes out of turn")));
}

void PeerBorrower::TakeHello(Peer& peer, absl::string_view body) {
  if (body.size() != GroupSecret::kNonceBytes || !peer.nonces.worker.empty()) {
    node_->Close(peer.link, absl::FailedPreconditionError("it does not greet as a lender does"));
    return;
  }
  peer.nonces = {.worker = std::string(body), .coordinator = GroupSecret::NewNonce()};
  SendCopy(
      *node_, peer.link, PeerMessage::kProof,
      peer.nonces.coordinator + options_.secret->Proof(GroupSecret::Side::kBorrower, peer.nonces));
}

void PeerBorrower::TakeWelcome(Peer& peer, absl::string_view body) {
  const absl::string_view proof = body.substr(0, kProofBytes);
  // Without a greeting on this link a proof would be that of an earlier one.
  if (peer.nonces.worker.empty() ||
      !options_.secret->Proves(GroupSecret::Side::kLender, peer.nonces, proof)) {
    node_->Close(peer.link, absl::UnauthenticatedError(
                                "it does not prove the secret; give all replicas the same "
                                "--peer-secret-file"));
    return;
  }
  WireHeads heads;
  if (body.size() < kProofBytes + sizeof(heads)) {
    node_->Close(peer.link, absl::FailedPreconditionError("its welcome ends too soon"));
    return;
  }
  std::memcpy(&heads, body.data() + kProofBytes, sizeof(heads));
  peer.heads = heads.range();
  const absl::string_view theirs = body.substr(kProofBytes + sizeof(heads));
  if (theirs != format_.FingerprintOfAnyHeads()) {
    node_->Close(peer.link, absl::FailedPreconditionError(absl::StrCat(
                                "it has blocks of ", theirs, ", this worker of ",
                                format_.FingerprintOfAnyHeads(),
                                "; peers must serve the same model, with the same KV")));
    return;
  }
  if (kvstore::Common(peer.heads, heads_).count == 0) {
    node_->Close(peer.link, absl::FailedPreconditionError(absl::StrCat(
                                "it has ", peer.heads.count, " KV heads from ", peer.heads.first,
                                ", this worker ", heads_.count, " from ", heads_.first,
                                "; give --peers all workers of a replica, rank 0 first")));
    return;
  }
  peer.state = Peer::State::kReady;
  peer.pause = {};
  peer.told.clear();
  ++num_linked_;
  spdlog::info("peer {}: linked, for blocks of {} KV heads from {}, {}", peer.name,
               peer.heads.count, peer.heads.first, std::string(theirs));
}

// --- blocks -------------------------------------------------------------------------------------

void PeerBorrower::Read(std::vector<kvstore::TierRead> reads) {
  for (kvstore::TierRead& read : reads) {
    const uint64_t ticket = read.ticket;
    blocks_[ticket].read = std::move(read);
    AddFetch({.block = ticket, .part = {.heads = heads_}});
  }
  Ask();
}

void PeerBorrower::AddFetch(const Fetch& fetch) {
  ++blocks_.at(fetch.block).parts_left;
  fetches_[++next_ticket_] = fetch;
  waiting_.push_back(next_ticket_);
}

int64_t PeerBorrower::BytesOf(const kvstore::HeadRange& heads) const {
  // Never fails: names that fit the rank's header fit that of some of its heads.
  return kvstore::ExtentFormat::Create(kvstore::ShardOfHeads(format_.shard(), heads))
      .value()
      .extent_bytes();
}

bool PeerBorrower::HasRoom(const Peer& peer, int64_t bytes) const {
  return peer.outstanding == 0 || peer.outstanding_bytes + bytes <= options_.window_bytes;
}

bool PeerBorrower::MayAsk(const Peer& peer, const kvstore::HeadRange& heads) const {
  return peer.state == Peer::State::kReady && kvstore::Common(peer.heads, heads).count > 0;
}

// Asks the peers for what waits, as far as their windows go.
void PeerBorrower::Ask() {
  std::vector<std::vector<WantedBlock>> by_peer(peers_.size());
  std::deque<uint64_t> still_waiting;
  while (!waiting_.empty()) {
    const uint64_t ticket = waiting_.front();
    waiting_.pop_front();
    Part& part = fetches_.at(ticket).part;
    while (part.peer < peers_.size() && !MayAsk(peers_[part.peer], part.heads)) ++part.peer;
    if (part.peer == peers_.size()) {
      End(ticket, fetches_.at(ticket).has_failed
                      ? absl::UnavailableError("a peer did not give the block")
                      : absl::NotFoundError("no peer has the block"));
      continue;
    }
    Split(ticket);
    Fetch& fetch = fetches_.at(ticket);
    Peer& peer = peers_[fetch.part.peer];
    const int64_t bytes = BytesOf(fetch.part.heads);
    if (!HasRoom(peer, bytes)) {
      still_waiting.push_back(ticket);
      continue;
    }
    if (peer.outstanding++ == 0) peer.heard = Clock::now();
    peer.outstanding_bytes += bytes;
    fetch.is_asked = true;
    by_peer[fetch.part.peer].push_back({.ticket = ticket,
                                        .hash = blocks_.at(fetch.block).read.hash,
                                        .heads = WireHeads::Of(fetch.part.heads)});
  }
  waiting_ = std::move(still_waiting);
  SendWants(std::move(by_peer));
}

void PeerBorrower::Split(uint64_t ticket) {
  Fetch fetch = fetches_.at(ticket);
  const kvstore::HeadRange wanted = fetch.part.heads;
  const kvstore::HeadRange has = kvstore::Common(peers_[fetch.part.peer].heads, wanted);
  fetches_.at(ticket).part.heads = has;
  for (const kvstore::HeadRange& rest :
       {kvstore::HeadRange{.first = wanted.first, .count = has.first - wanted.first},
        kvstore::HeadRange{.first = has.end(), .count = wanted.end() - has.end()}}) {
    if (rest.count == 0) continue;
    fetch.part.heads = rest;
    AddFetch(fetch);
  }
}

// A part that came after another one failed is not needed any more.
void PeerBorrower::End(uint64_t ticket, const absl::Status& status) {
  Fetch fetch = std::move(fetches_.extract(ticket).mapped());
  const auto it = blocks_.find(fetch.block);
  Block& block = it->second;
  // One that may be somewhere says more than one that is nowhere.
  if (block.status.ok() || absl::IsUnavailable(status)) block.status = status;
  block.parts.push_back(std::move(fetch.part));
  if (--block.parts_left > 0) return;
  const Block ended = std::move(it->second);
  blocks_.erase(it);
  on_end_(ended.read, ended.status.ok() ? ended.parts : std::vector<Part>(), ended.status);
}

void PeerBorrower::SendWants(std::vector<std::vector<WantedBlock>> by_peer) {
  for (size_t i = 0; i < by_peer.size(); ++i) {
    for (size_t begin = 0; begin < by_peer[i].size(); begin += kMostWantedBlocks) {
      const size_t count = std::min(kMostWantedBlocks, by_peer[i].size() - begin);
      SendCopy(*node_, peers_[i].link, PeerMessage::kWant,
               std::string(reinterpret_cast<const char*>(by_peer[i].data() + begin),
                           count * sizeof(WantedBlock)));
    }
  }
}

void PeerBorrower::OnOutcome(Peer& peer, const PeerHeader& header) {
  const auto it = fetches_.find(header.ticket);
  const bool is_asked =
      it != fetches_.end() && it->second.is_asked && &peers_[it->second.part.peer] == &peer;
  // No block can be both on its way and absent.
  const bool fits = is_asked && !it->second.outcome.has_value() &&
                    !(header.kind == PeerMessage::kAbsent && it->second.has_place);
  if (header.kind == PeerMessage::kBlock && is_asked) {
    it->second.is_here = true;
  } else if (fits) {
    it->second.outcome = header.kind;
  } else {
    node_->Close(peer.link, absl::FailedPreconditionError("it spoke of a block out of turn"));
    return;
  }
  Settle(header.ticket, it->second);
}

void PeerBorrower::Settle(uint64_t ticket, Fetch& fetch) {
  if (!fetch.outcome.has_value()) return;
  if (*fetch.outcome != PeerMessage::kAbsent && !fetch.is_here) return;
  Peer& peer = peers_[fetch.part.peer];
  --peer.outstanding;
  peer.outstanding_bytes -= BytesOf(fetch.part.heads);
  if (*fetch.outcome == PeerMessage::kWhole) {
    End(ticket, absl::OkStatus());
  } else {
    AskNext(ticket, fetch);
  }
  Ask();
}

void PeerBorrower::AskNext(uint64_t ticket, Fetch& fetch) {
  fetch = {.block = fetch.block,
           .part = {.heads = fetch.part.heads, .peer = fetch.part.peer + 1},
           .has_failed = fetch.has_failed};
  waiting_.push_back(ticket);
}

void PeerBorrower::OnWrongBytes(size_t peer, const absl::Status& why) {
  if (peers_[peer].state != Peer::State::kReady) return;
  node_->Close(peers_[peer].link,
               absl::DataLossError(absl::StrCat("it sent wrong bytes: ", why.message())));
}

}  // namespace kvasir::worker
