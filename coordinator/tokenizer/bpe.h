// Byte-pair encoding of one pre-token: its bytes, or its characters, become symbols, which are
// merged pairwise in order of rank, the leftmost pair first among equals, until no pair of
// neighbours has a merge. Hides the pair table, bytes in place of characters without a token, and
// the two ways to run it: a scan for short pre-tokens, and a heap over a linked list for long ones,
// whose n log n time makes one character repeated for a megabyte harmless. Called by the tokenizer.
// Immutable after construction, so it may be shared between threads; a Workspace belongs to one
// call at a time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::coordinator {

class BpeModel {
 public:
  struct Merge {
    int32_t left;
    int32_t right;
    int32_t result;
  };

  // The first symbols of a vocabulary made by SentencePiece.
  struct Characters {
    absl::flat_hash_map<char32_t, int32_t> ids;
    // Stands for a character that has neither a token nor tokens for all of its bytes.
    std::optional<int32_t> unknown;
    bool fuses_unknown = false;  // one for neighbours
  };

  struct Params {
    std::array<int32_t, 256> byte_ids;  // the token of each single byte; -1 if there is none
    // Unset: every byte is a symbol. Set: every character is one, and byte_ids are for those
    // without a token.
    std::optional<Characters> characters;
    std::vector<Merge> merges;  // in order of rank; no pair twice
    // Pre-tokens that are looked up whole before merging ("ignore_merges"). May be empty.
    std::vector<std::pair<std::string, int32_t>> whole_tokens;
  };

  // Memory of Encode, kept between calls.
  class Workspace {
    friend class BpeModel;
    struct Symbol {
      int32_t id;
      int32_t previous;
      int32_t next;
      int32_t rank;  // of the pair (this, next)
    };
    std::vector<int32_t> first_;  // symbols before merging
    std::vector<Symbol> symbols_;
    std::vector<uint64_t> heap_;  // rank << 32 | position
  };

  explicit BpeModel(Params params);

  // Appends the ids of `piece` (of characters: well-formed UTF-8). Leaves out bytes and characters
  // without a token, and their neighbours may merge, as in Hugging Face's library.
  // REQUIRES: size < 2^31.
  void Encode(absl::string_view piece, Workspace* workspace, std::vector<int32_t>* ids) const;

 private:
  struct Merged {
    int32_t rank;
    int32_t id;
  };

  const Merged* FindMerge(int32_t left, int32_t right) const;
  // Replaces `symbols` by those of `piece` before merging.
  void FirstSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const;
  void CharacterSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const;
  // Appends the tokens of the bytes of one character, if they all have one.
  bool AppendBytes(absl::string_view character, std::vector<int32_t>* symbols) const;
  void EncodeShort(absl::Span<const int32_t> first, std::vector<int32_t>* ids) const;
  void EncodeLong(Workspace* workspace, std::vector<int32_t>* ids) const;
  // Looks up the pair that begins at `position` and queues it.
  void QueuePair(size_t position, Workspace* workspace) const;

  std::array<int32_t, 256> byte_ids_;
  std::optional<Characters> characters_;
  absl::flat_hash_map<uint64_t, Merged> merges_;
  absl::flat_hash_map<std::string, int32_t> whole_tokens_;
};

}  // namespace kvasir::coordinator
