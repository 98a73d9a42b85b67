// A batch for Attend and for selectors, built step by step by a test or benchmark: sequences with
// random KV in a FakePagedKv, query tiles, and a selection per (block, KV head). Seeds are
// explicit. Thread-compatible.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/attention/attend.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/common/stages.h"
#include "tests/support/fake_paged_kv.h"

namespace kvasir::kernels {

struct AttentionShape {
  DType activation = DType::kFloat32;
  DType kv = DType::kFloat32;
  int64_t head_dim = 64;
  int64_t kv_heads = 2;
  int64_t group = 2;  // query heads per KV head
  int64_t layer = 1;  // the one under test, behind others
};

// A selection row as a test writes it.
struct RowSelection {
  SelectionHeader header;
  std::vector<SelectionEntry> entries;
};

inline RowSelection SelectList(int64_t sink_end, int64_t window_begin,
                               std::vector<SelectionEntry> entries) {
  return {.header = {.kind = SelectionHeader::Kind::kList,
                     .count = static_cast<int32_t>(entries.size()),
                     .sink_end = sink_end,
                     .window_begin = window_begin},
          .entries = std::move(entries)};
}

inline RowSelection SelectAll(int64_t position) {
  return {.header = {.kind = SelectionHeader::Kind::kAll, .query_position = position},
          .entries = {}};
}

class AttentionBatch {
 public:
  AttentionBatch(const AttentionShape& shape, int64_t num_slots, int64_t max_tokens, uint64_t seed)
      : shape_(shape),
        rng_(seed),
        kv_({.num_layers = shape.layer + 1,
             .num_kv_heads = shape.kv_heads,
             .head_dim = shape.head_dim,
             .dtype = shape.kv},
            num_slots, (max_tokens + kPageTokens - 1) / kPageTokens),
        faults_(static_cast<size_t>(num_slots)) {}

  // Random keys and values at positions [0, tokens) of the slot, in the layer under test; digests
  // follow. The other layers stay NaN. Key number p is 1 + p `growth` times as large as others are,
  // and with it the logits of later pages.
  void FillContext(int64_t slot, int64_t tokens, double growth = 0) {
    kv_.Grow(slot, tokens);
    for (int64_t position = 0; position < tokens; ++position) {
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        for (const auto side : {FakePagedKv::Side::kKey, FakePagedKv::Side::kValue}) {
          const auto size = static_cast<float>(
              side == FakePagedKv::Side::kKey ? 1 + static_cast<double>(position) * growth : 1);
          std::vector<float> token(static_cast<size_t>(shape_.head_dim));
          for (float& x : token) x = size * Normal();
          kv_.SetToken(side, slot, position, shape_.layer, head, token);
        }
      }
    }
    for (int64_t begin = 0; begin < tokens; begin += kPageTokens) {
      const int64_t count = std::min(kPageTokens, tokens - begin);
      KVASIR_CHECK(RebuildBounds(kv_.View(), slot, begin / kPageTokens, count).ok());
      KVASIR_CHECK(RebuildKeyCodes(kv_.View(), slot, begin / kPageTokens, count).ok());
    }
  }

  // Of logits; 1 / sqrt(head_dim) until then.
  void UseScale(float scale) { scale_ = scale; }

  // From now on keys and queries count as un-rotated, and rows attend at compact positions.
  void UseCompactPositions(double attention_scaling = 1) {
    std::vector<double> inv_freq;
    for (int64_t i = 0; i < shape_.head_dim / 2; ++i) {
      inv_freq.push_back(InverseFrequency(i));
    }
    rope_.emplace(inv_freq, attention_scaling);
  }
  // The same at grouped positions.
  void UseGroupedPositions(const GroupedPositions& grouped, double attention_scaling = 1) {
    UseCompactPositions(attention_scaling);
    grouped_ = grouped;
  }
  const GroupedPositions& grouped() const { return grouped_; }
  // The layer's window (AttendCall::window_tokens).
  void UseWindow(int64_t tokens) { window_tokens_ = tokens; }
  int64_t window_tokens() const { return window_tokens_; }
  double InverseFrequency(int64_t i) const {
    return std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(shape_.head_dim));
  }
  RopePositions* rope() { return rope_.has_value() ? &*rope_ : nullptr; }

  // Adds `num_rows` random queries at first_position.. of the slot; `select` gives the selection of
  // each KV head (all, when absent). Returns the block's index.
  int64_t AddBlock(int64_t slot, int64_t first_position, int64_t num_rows,
                   const std::function<RowSelection(int64_t head)>& select = nullptr) {
    tiles_.push_back({.slot = slot,
                      .first_row = num_tokens(),
                      .num_rows = num_rows,
                      .first_position = first_position});
    q_.resize(q_.size() + static_cast<size_t>(num_rows * heads() * shape_.head_dim));
    for (auto it = q_.end() - num_rows * heads() * shape_.head_dim; it != q_.end(); ++it) {
      *it = Rounded(Normal());
    }
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      selections_.push_back(select ? select(head) : SelectAll(first_position));
    }
    return static_cast<int64_t>(tiles_.size()) - 1;
  }

  // What may end the rows of each block early. To be called when all blocks are there.
  void SetTerminations(std::vector<Termination> terminations) {
    KVASIR_CHECK(terminations.size() == tiles_.size());
    terminations_ = std::move(terminations);
    unread_.resize(selections_.size());
  }
  const UnreadPages& unread(int64_t block, int64_t head) const {
    return unread_[static_cast<size_t>(block * shape_.kv_heads + head)];
  }

  using Implementation = std::function<void(const AttendParams&, Executor&)>;
  // Runs over all blocks; out(), lse() and faults() hold the result. Rows start as NaN.
  void Run(const Implementation& implementation, Executor& executor) {
    StoreQueries();
    out_.assign(q_.size(), kPoison);
    out16_.assign(q_.size(), BFloat16(kPoison));
    lse_.assign(static_cast<size_t>(num_tokens() * heads()), kPoison);
    faults_.assign(faults_.size(), 0);
    const AttendParams params = Params();
    if (grouped_.on()) {
      rope()->Reserve(EndOfPositions(params.tiles), executor);
    } else if (rope() != nullptr) {
      ReservePositions(params.selection, tiles_, shape_.kv_heads, *rope(), executor);
    }
    implementation(params, executor);
    if (shape_.activation == DType::kBFloat16) {
      for (size_t i = 0; i < out_.size(); ++i) out_[i] = static_cast<float>(out16_[i]);
    }
  }
  void Run(const Implementation& implementation) {
    SerialExecutor executor;
    Run(implementation, executor);
  }

  // Valid until the batch changes.
  AttendParams Params() {
    StoreSelections();
    AttendParams params = {
        {.q = Tensor(q_, q16_),
         .out = Tensor(out_, out16_),
         .lse = TensorView(lse_.data(), DType::kFloat32, {num_tokens(), heads()}),
         .kv = kv_.View(),
         .layer = shape_.layer,
         .scale = scale_,
         .tiles = tiles_,
         .selection = {.headers = headers_.data(),
                       .entries = entries_.data(),
                       .num_rows = static_cast<int64_t>(headers_.size()),
                       .capacity = capacity_},
         .faults = faults_,
         .grouped = grouped_,
         .window_tokens = window_tokens_}};
    params.scratch = &scratch_;
    params.rope = rope();
    params.terminations = terminations_;
    params.unread = unread_;
    return params;
  }

  // Valid until the batch changes; `numbers` is the caller's. Selections stay as they are.
  SelectParams ParamsForSelect(const std::vector<PolicyNumbers>& numbers) {
    StoreQueries();
    SelectParams params = {{.q = Tensor(q_, q16_),
                            .kv = kv_.View(),
                            .layer = shape_.layer,
                            .scale = scale_,
                            .tiles = tiles_,
                            .numbers = numbers,
                            .faults = faults_}};
    params.scratch = &scratch_;
    params.rope = rope();
    return params;
  }
  // A selection with room for `capacity` entries a row, to be filled by a selector. Takes the place
  // of what AddBlock was given.
  PageSelection MakeSelection(int64_t capacity) {
    selections_.assign(selections_.size(), {});
    for (RowSelection& row : selections_) row.entries.resize(static_cast<size_t>(capacity));
    return Params().selection;
  }

  // Rows as a selector left them elsewhere: headers [blocks x KV heads], entries [rows, capacity].
  void SetSelections(const std::vector<SelectionHeader>& headers,
                     const std::vector<SelectionEntry>& entries) {
    const size_t capacity = entries.size() / headers.size();
    for (size_t row = 0; row < headers.size(); ++row) {
      const auto begin = entries.begin() + static_cast<std::ptrdiff_t>(row * capacity);
      selections_[row] = {.header = headers[row],
                          .entries = {begin, begin + static_cast<std::ptrdiff_t>(capacity)}};
    }
  }

  // The queries [token][head][head_dim], already rounded to the activation dtype.
  float* q(int64_t token, int64_t head) { return &q_[Index(token, head)]; }
  const float* out(int64_t token, int64_t head) const { return &out_[Index(token, head)]; }
  float lse(int64_t token, int64_t head) const {
    return lse_[static_cast<size_t>(token * heads() + head)];
  }
  uint8_t fault(int64_t slot) const { return faults_[static_cast<size_t>(slot)]; }
  const RowSelection& selection(int64_t block, int64_t head) const {
    return selections_[static_cast<size_t>(block * shape_.kv_heads + head)];
  }

  // Keeps the results of another batch of the same shape, to compare a later run with.
  void CopyResults(const AttentionBatch& other) {
    out_ = other.out_;
    lse_ = other.lse_;
  }
  int64_t scratch_bytes() const { return scratch_.size_bytes(); }

  FakePagedKv& kv() { return kv_; }
  const std::vector<QueryTile>& blocks() const { return tiles_; }
  const AttentionShape& shape() const { return shape_; }
  int64_t heads() const { return shape_.kv_heads * shape_.group; }
  int64_t num_tokens() const {
    return static_cast<int64_t>(q_.size()) / (heads() * shape_.head_dim);
  }
  std::mt19937_64& rng() { return rng_; }

  static constexpr int64_t kLayer = 1;  // the layer under test, unless the shape says otherwise

 private:
  static constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

  float Normal() { return std::normal_distribution<float>()(rng_); }
  float Rounded(float x) const {
    return shape_.activation == DType::kFloat32 ? x : static_cast<float>(BFloat16(x));
  }
  // Of the activation dtype.
  TensorView Tensor(std::vector<float>& wide, std::vector<BFloat16>& narrow) const {
    void* data = shape_.activation == DType::kFloat32 ? static_cast<void*>(wide.data())
                                                      : static_cast<void*>(narrow.data());
    return TensorView(data, shape_.activation, {num_tokens(), heads(), shape_.head_dim});
  }
  size_t Index(int64_t token, int64_t head) const {
    return static_cast<size_t>((token * heads() + head) * shape_.head_dim);
  }
  void StoreQueries() {
    q16_.resize(q_.size());
    for (size_t i = 0; i < q_.size(); ++i) q16_[i] = BFloat16(q_[i]);
  }
  void StoreSelections() {
    capacity_ = 0;
    for (const RowSelection& row : selections_) {
      capacity_ = std::max(capacity_, static_cast<int64_t>(row.entries.size()));
    }
    headers_.resize(selections_.size());
    entries_.resize(selections_.size() * static_cast<size_t>(capacity_));
    for (size_t i = 0; i < selections_.size(); ++i) {
      headers_[i] = selections_[i].header;
      std::copy(selections_[i].entries.begin(), selections_[i].entries.end(),
                entries_.begin() + static_cast<int64_t>(i) * capacity_);
    }
    AssignPositions({.headers = headers_.data(),
                     .entries = entries_.data(),
                     .num_rows = static_cast<int64_t>(headers_.size()),
                     .capacity = capacity_});
  }

  const AttentionShape shape_;
  std::mt19937_64 rng_;
  FakePagedKv kv_;
  std::vector<QueryTile> tiles_;
  std::vector<RowSelection> selections_;  // [blocks x KV heads]
  int64_t capacity_ = 0;
  std::vector<SelectionHeader> headers_;
  std::vector<SelectionEntry> entries_;
  std::vector<float> q_;
  std::vector<float> out_;
  std::vector<BFloat16> q16_;
  std::vector<BFloat16> out16_;
  std::vector<float> lse_;
  std::vector<uint8_t> faults_;
  Scratch scratch_;
  float scale_ = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  std::optional<RopePositions> rope_;
  GroupedPositions grouped_;
  int64_t window_tokens_ = 0;
  std::vector<Termination> terminations_;
  std::vector<UnreadPages> unread_;
};

}  // namespace kvasir::kernels
