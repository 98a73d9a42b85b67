#include "coordinator/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
constexpr int32_t kNoSymbol = -1;
// Most symbols of a pre-token for which a scan over all pairs is faster than the heap. Nearly all
// words have fewer.
constexpr size_t kShortPiece = 48;

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
}

}  // namespace

BpeModel::BpeModel(Params params)
    : byte_ids_(params.byte_ids), characters_(std::move(params.characters)) {
  merges_.reserve(params.merges.size());
  for (size_t rank = 0; rank < params.merges.size(); ++rank) {
    const Merge& merge = params.merges[rank];
    const bool inserted = merges_
                              .try_emplace(PairKey(merge.left, merge.right),
                                           Merged{static_cast<int32_t>(rank), merge.result})
                              .second;
    KVASIR_CHECK(inserted);
  }
  whole_tokens_.reserve(params.whole_tokens.size());
  for (auto& [bytes, id] : params.whole_tokens) whole_tokens_.try_emplace(std::move(bytes), id);
}

const BpeModel::Merged* BpeModel::FindMerge(int32_t left, int32_t right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BpeModel::Encode(absl::string_view piece, Workspace* workspace,
                      std::vector<int32_t>* ids) const {
  KVASIR_CHECK(piece.size() < static_cast<size_t>(kNoRank));
  if (!whole_tokens_.empty()) {
    const auto it = whole_tokens_.find(piece);
    if (it != whole_tokens_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  FirstSymbols(piece, &workspace->first_);
  if (workspace->first_.size() <= kShortPiece) {
    EncodeShort(workspace->first_, ids);
  } else {
    EncodeLong(workspace, ids);
  }
}

void BpeModel::FirstSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const {
  symbols->clear();
  if (characters_.has_value()) return CharacterSymbols(piece, symbols);
  for (const char c : piece) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id >= 0) symbols->push_back(id);
  }
}

void BpeModel::CharacterSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const {
  // Hugging Face's library puts an unknown symbol off to the next character with a token, so that
  // neighbours can fuse: bytes of characters between them come first.
  bool unknown = false;
  const auto add_unknown = [&] {
    if (unknown) symbols->push_back(*characters_->unknown);
  };
  for (size_t pos = 0; pos < piece.size();) {
    const Utf8Unit unit = CodePointAt(piece, pos);
    const absl::string_view character = piece.substr(pos, unit.length);
    pos += unit.length;
    const auto it = characters_->ids.find(unit.value);
    if (it != characters_->ids.end()) {
      add_unknown();
      unknown = false;
      symbols->push_back(it->second);
    } else if (!AppendBytes(character, symbols) && characters_->unknown.has_value()) {
      if (!characters_->fuses_unknown) add_unknown();
      unknown = true;
    }
  }
  add_unknown();
}

bool BpeModel::AppendBytes(absl::string_view character, std::vector<int32_t>* symbols) const {
  const size_t size = symbols->size();
  for (const char c : character) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id < 0) {
      symbols->resize(size);
      return false;
    }
    symbols->push_back(id);
  }
  return true;
}

void BpeModel::EncodeShort(absl::Span<const int32_t> first, std::vector<int32_t>* ids) const {
  std::array<int32_t, kShortPiece> symbols;
  std::array<Merged, kShortPiece> pairs;  // pairs[i] merges symbols i and i + 1
  size_t n = first.size();
  std::copy(first.begin(), first.end(), symbols.begin());
  const auto look_up = [&](size_t i) {
    const Merged* merged = FindMerge(symbols[i], symbols[i + 1]);
    pairs[i] = merged != nullptr ? *merged : Merged{kNoRank, kNoSymbol};
  };
  for (size_t i = 0; i + 1 < n; ++i) look_up(i);
  while (n > 1) {
    const auto best = std::min_element(
        pairs.begin(), pairs.begin() + static_cast<int64_t>(n) - 1,
        [](const Merged& a, const Merged& b) { return a.rank < b.rank; });  // first among equals
    if (best->rank == kNoRank) break;
    const auto i = static_cast<size_t>(best - pairs.begin());
    symbols[i] = best->id;
    std::copy(symbols.begin() + i + 2, symbols.begin() + n, symbols.begin() + i + 1);
    std::copy(pairs.begin() + i + 1, pairs.begin() + n - 1, pairs.begin() + i);
    --n;
    if (i > 0) look_up(i - 1);
    if (i + 1 < n) look_up(i);
  }
  ids->insert(ids->end(), symbols.begin(), symbols.begin() + n);
}

void BpeModel::QueuePair(size_t position, Workspace* workspace) const {
  Workspace::Symbol& symbol = workspace->symbols_[position];
  symbol.rank = kNoRank;
  if (symbol.next == kNoSymbol) return;
  const Merged* merged =
      FindMerge(symbol.id, workspace->symbols_[static_cast<size_t>(symbol.next)].id);
  if (merged == nullptr) return;
  symbol.rank = merged->rank;
  workspace->heap_.push_back(static_cast<uint64_t>(merged->rank) << 32 | position);
}

void BpeModel::EncodeLong(Workspace* workspace, std::vector<int32_t>* ids) const {
  auto& symbols = workspace->symbols_;
  auto& heap = workspace->heap_;
  symbols.clear();
  heap.clear();
  for (const int32_t id : workspace->first_) {
    const auto i = static_cast<int32_t>(symbols.size());
    symbols.push_back({.id = id, .previous = i - 1, .next = i + 1, .rank = kNoRank});
  }
  if (!symbols.empty()) symbols.back().next = kNoSymbol;
  for (size_t i = 0; i < symbols.size(); ++i) QueuePair(i, workspace);
  constexpr std::greater<> kSmallestFirst;
  std::make_heap(heap.begin(), heap.end(), kSmallestFirst);
  while (!heap.empty()) {
    const uint64_t entry = heap.front();
    std::pop_heap(heap.begin(), heap.end(), kSmallestFirst);
    heap.pop_back();
    const size_t position = entry & 0xFFFFFFFFu;
    Workspace::Symbol& left = symbols[position];
    // The heap keeps entries of pairs that have changed. The rank shows it: it is unique to a pair.
    if (left.rank != static_cast<int32_t>(entry >> 32)) continue;
    Workspace::Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = FindMerge(left.id, right.id)->id;
    left.next = right.next;
    right.rank = kNoRank;
    right.id = kNoSymbol;
    const auto queue = [&](size_t p) {
      const size_t size = heap.size();
      QueuePair(p, workspace);
      if (heap.size() > size) std::push_heap(heap.begin(), heap.end(), kSmallestFirst);
    };
    if (left.next != kNoSymbol)
      symbols[static_cast<size_t>(left.next)].previous = static_cast<int32_t>(position);
    queue(position);
    if (left.previous != kNoSymbol) queue(static_cast<size_t>(left.previous));
  }
  for (const Workspace::Symbol& symbol : symbols) {
    if (symbol.id != kNoSymbol) ids->push_back(symbol.id);
  }
}

}  // namespace kvasir::coordinator
