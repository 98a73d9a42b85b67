// The messages between a worker that lends blocks (PeerLender) and one of another replica that
// borrows them (PeerBorrower), over a link that the borrower opened. Both ends have the same byte
// order: the fingerprint names it.
//
//   lender                                 borrower
//     kHello{l}                  ------>                      at once; l: 32 random bytes
//                                <------   kProof{b, proof}   of the secret, over l and b
//     kWelcome{proof, heads,     ------>                      model and form must be equal, heads
//     may
//              model and form}                                differ
//                                <------   kWant{blocks}      of each, heads that the lender has
//     kBlock{extent}, then kWhole ----->                      for each, in any order: the extent of
//                                                             these heads (HeadExtent)
//     kAbsent                    ------>                      or: it has no such block
//     kGone                      ------>                      or, after kBlock: it gave way
//     meanwhile
//
// The lender never writes where the borrower did not say: kBlock's place is that of its ticket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "absl/types/span.h"

#include "kvstore/format/block.h"
#include "kvstore/format/head_extent.h"

namespace kvasir::worker {

enum class PeerMessage : uint32_t {
  kHello = 1,
  kProof,
  kWelcome,
  kWant,
  kBlock,
  kWhole,
  kGone,
  kAbsent
};

struct PeerHeader {
  static constexpr uint32_t kMagic = 0x3250564b;  // "KVP2": the version of these messages

  uint32_t magic = kMagic;
  PeerMessage kind = PeerMessage::kHello;
  uint64_t ticket = 0;  // of what is asked for: chosen by the borrower. 0 for other messages

  absl::Span<const std::byte> bytes() const {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(this), sizeof(*this));
  }
};

// Some KV heads of the model, in a row.
struct WireHeads {
  uint32_t first = 0;
  uint32_t count = 0;

  static WireHeads Of(const kvstore::HeadRange& heads) {
    return {.first = static_cast<uint32_t>(heads.first),
            .count = static_cast<uint32_t>(heads.count)};
  }
  kvstore::HeadRange range() const { return {.first = first, .count = count}; }
};

// An element of kWant's body.
struct WantedBlock {
  uint64_t ticket = 0;
  kvstore::PrefixHash hash{};
  WireHeads heads;
};
static_assert(sizeof(WantedBlock) == 48);

// Longest body of kHello, kProof and kWelcome, and most blocks of a kWant: short enough to come
// with its description, so that one is whole before the next begins.
inline constexpr size_t kMostGreetingBytes = 1024;
inline constexpr size_t kMostWantedBlocks = 256;

// Nothing for what is no header of this version.
inline std::optional<PeerHeader> ReadPeerHeader(absl::Span<const std::byte> bytes) {
  PeerHeader header;
  if (bytes.size() != sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != PeerHeader::kMagic) return std::nullopt;
  return header;
}

}  // namespace kvasir::worker
