#include "kernels/attention/attend_cpu.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/attention/attention_state.h"
#include "kernels/attention/early_end.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoKey = -std::numeric_limits<float>::infinity();

// One query of one head, with its partial result.
struct Query {
  std::vector<float> q;
  std::vector<float> far_q;  // with grouped positions: as far keys see it
  AttentionState state;
  std::vector<float> out;

  explicit Query(int64_t head_dim)
      : q(static_cast<size_t>(head_dim)),
        far_q(static_cast<size_t>(head_dim)),
        out(static_cast<size_t>(head_dim)) {}
  void Reset() {
    state = {};
    std::fill(out.begin(), out.end(), 0.0f);
  }
};

template <typename Kv>
float Dot(const std::vector<float>& q, const Kv* key) {
  float dot = 0;
  for (size_t i = 0; i < q.size(); ++i) dot += q[i] * static_cast<float>(key[i]);
  return dot;
}

// Adds the tokens of `mask` of one page, as `q` sees them. Tokens outside the mask are not read.
template <typename Kv>
void AddPage(int64_t head_dim, const std::byte* key_bytes, const std::byte* value_bytes,
             uint64_t mask, float scale, const std::vector<float>& q, Query& query) {
  const Kv* keys = reinterpret_cast<const Kv*>(key_bytes);
  const Kv* values = reinterpret_cast<const Kv*>(value_bytes);
  const int64_t d = head_dim;
  float logits[kPageTokens];
  float max = query.state.max;
  for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
    const int t = std::countr_zero(rest);
    logits[t] = scale * Dot(q, keys + t * d);
    max = std::max(max, logits[t]);  // a NaN is dropped here and shows in the sum
  }
  // max is -inf before the first key, and as long as all logits are NaN or -inf.
  const float subtract = max == kNoKey ? 0 : max;
  const float keep = std::exp(query.state.max - subtract);
  query.state.max = max;
  query.state.sum *= keep;
  for (float& x : query.out) x *= keep;
  for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
    const int t = std::countr_zero(rest);
    const float weight = std::exp(logits[t] - subtract);
    query.state.sum += weight;
    for (size_t i = 0; i < query.out.size(); ++i) {
      query.out[i] += weight * static_cast<float>(values[t * d + static_cast<int64_t>(i)]);
    }
  }
}

void Merge(Query& left, const Query& right) {
  const MergeWeights weights = MergeInto(left.state, right.state);
  for (size_t i = 0; i < left.out.size(); ++i) {
    left.out[i] = weights.left * left.out[i] + weights.right * right.out[i];
  }
}

// One (query tile, KV head).
template <typename Activation, typename Kv>
class Row {
 public:
  Row(const AttendParams& p, int64_t row)
      : p_(p),
        row_(row),
        tile_(p.tiles[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        kv_head_(row % p.kv.layout.num_kv_heads),
        header_(p.selection.header(row)),
        group_(p.q.dim(1) / p.kv.layout.num_kv_heads) {
    for (int64_t i = 0; i < tile_.num_rows * group_; ++i) {
      total_.emplace_back(p.kv.layout.head_dim);
      segment_.emplace_back(p.kv.layout.head_dim);
    }
    const int64_t last_position = tile_.first_position + tile_.num_rows - 1;
    steps_.resize(static_cast<size_t>(last_position / kPageTokens + 1));
    const SelectedPages walk(header_, p.selection.list(row), last_position);
    steps_.resize(static_cast<size_t>(ListSteps(walk, std::ssize(steps_), steps_.data())));
    ending_ = HostBuffer::Allocate(EarlyEnd::MemoryBytes(p, std::ssize(steps_))).value();
  }

  void Run() {
    for (int64_t i = 0; i < tile_.num_rows * group_; ++i) LoadQuery(i);
    AddPages();
    for (int64_t i = 0; i < tile_.num_rows * group_; ++i) Store(i);
  }

 private:
  // Query i is of head i % group_ of row i / group_ of the tile.
  int64_t QRow(int64_t i) const {
    return (tile_.first_row + i / group_) * p_.q.dim(1) + kv_head_ * group_ + i % group_;
  }
  int64_t Position(int64_t i) const { return tile_.first_position + i / group_; }

  void LoadQuery(int64_t i) {
    const int64_t d = p_.kv.layout.head_dim;
    const Activation* q = p_.q.As<const Activation>() + QRow(i) * d;
    Query& segment = segment_[static_cast<size_t>(i)];
    const int64_t position = Position(i);
    if (p_.grouped.on()) {
      CopyQuery({q, q + d}, position, segment.q);
      CopyQuery({q, q + d}, p_.grouped.FarQuery(position), segment.far_q);
    } else {
      CopyQuery({q, q + d}, QueryPosition(header_, position), segment.q);
    }
  }
  void CopyQuery(std::vector<Activation> query, int64_t position, std::vector<float>& to) const {
    if (p_.rope != nullptr) p_.rope->Rotate(query.data(), p_.q.dtype(), 1, position);
    std::transform(query.begin(), query.end(), to.begin(),
                   [](Activation x) { return static_cast<float>(x); });
  }

  struct Page {
    const std::byte* cached_keys = nullptr;  // null, like `values`, when the page is absent
    const std::byte* values = nullptr;
    std::vector<std::byte> elements = {};      // those of quantized KV
    std::vector<std::byte> rotated_keys = {};  // empty: the cached keys are used
    std::vector<std::byte> far_keys = {};      // with grouped positions

    const std::byte* keys() const {
      return rotated_keys.empty() ? cached_keys : rotated_keys.data();
    }
  };

  void Add(const Page& page, const std::byte* keys, uint64_t mask, const std::vector<float>& q,
           Query& query) const {
    AddPage<Kv>(p_.kv.layout.head_dim, keys, page.values, mask, p_.scale, q, query);
  }

  // Adds the pages to all queries, one page after the other: a page that was brought from disk may
  // leave once others were (absent_pages.h).
  void AddPages() {
    EarlyEnd end(p_, row_, steps_, ending_.data());
    int64_t segment = -1;
    for (int64_t i = 0; i < std::ssize(steps_);) {
      const PageStep& step = steps_[static_cast<size_t>(i)];
      if (step.segment != segment) CloseSegment();
      segment = step.segment;
      const Page page = Read(step);
      if (page.values != nullptr) {
        for (int64_t q = 0; q < std::ssize(segment_); ++q) AddToQuery(q, step, page);
      }
      ++i;
      if (!end.never()) i = end.After(Progress(), i);
    }
    CloseSegment();
  }

  void AddToQuery(int64_t i, const PageStep& step, const Page& page) {
    Query& query = segment_[static_cast<size_t>(i)];
    const int64_t position = Position(i);
    const uint64_t seen = step.mask & TokenMask(0, position + 1 - step.page * kPageTokens) &
                          ~BeforeWindow(p_.window_tokens, step.page, position);
    const uint64_t far = p_.grouped.on() ? p_.grouped.FarMask(step.page, position) : 0;
    if (far != 0) Add(page, page.far_keys.data(), seen & far, query.far_q, query);
    if (~far != 0) Add(page, page.keys(), seen & ~far, query.q, query);
  }

  Page Read(const PageStep& step) {
    const int64_t bytes = std::popcount(step.mask) * p_.kv.layout.token_bytes();
    const PageRef ref = p_.kv.Read(tile_.slot, step.page, p_.layer, kv_head_, bytes);
    if (ref.tier() == PageTier::kAbsent) {
      std::atomic_ref<uint8_t>(p_.faults[static_cast<size_t>(tile_.slot)])
          .store(1, std::memory_order_relaxed);
      return {};
    }
    const KvLayout& layout = p_.kv.layout;
    Page page;
    page.elements.resize(static_cast<size_t>(DequantizedPageBytes(layout)));
    const PageElements elements =
        ReadPage(layout, ref.page(), step.mask, /*next_page=*/nullptr, page.elements.data());
    page.cached_keys = elements.keys;
    page.values = elements.values;
    if (p_.rope == nullptr) return page;
    page.rotated_keys.resize(static_cast<size_t>(kPageTokens * layout.element_row_bytes()));
    if (!p_.grouped.on()) {
      RotateKeys(
          *p_.rope, layout, header_,
          {.keys = page.cached_keys, .page = step.page, .mask = step.mask, .entry = step.entry},
          page.rotated_keys.data());
      return page;
    }
    const PageKeys keys = {.keys = page.cached_keys, .page = step.page, .mask = step.mask};
    RotateNearKeys(*p_.rope, layout, keys, page.rotated_keys.data());
    page.far_keys.resize(page.rotated_keys.size());
    RotateFarKeys(*p_.rope, layout, p_.grouped, keys, page.far_keys.data());
    return page;
  }

  void CloseSegment() {
    for (size_t i = 0; i < segment_.size(); ++i) {
      Merge(total_[i], segment_[i]);
      segment_[i].Reset();
    }
  }

  RowProgress Progress() {
    closed_.clear();
    open_.clear();
    for (size_t i = 0; i < segment_.size(); ++i) {
      closed_.push_back({.state = total_[i].state, .out = total_[i].out.data()});
      open_.push_back({.state = segment_[i].state, .out = segment_[i].out.data()});
    }
    return {.closed = closed_, .open = open_};
  }

  void Store(int64_t i) {
    const int64_t d = p_.kv.layout.head_dim;
    const Query& total = total_[static_cast<size_t>(i)];
    Activation* out = p_.out.As<Activation>() + QRow(i) * d;
    const float sum = total.state.sum;
    for (int64_t j = 0; j < d; ++j) {
      const float x = total.out[static_cast<size_t>(j)];
      out[j] = static_cast<Activation>(sum == 0 ? 0.0f : x / sum);
    }
    if (!p_.lse.empty()) p_.lse.As<float>()[QRow(i)] = LogSumExp(total.state);
  }

  const AttendParams& p_;
  const int64_t row_;
  const QueryTile& tile_;
  const int64_t kv_head_;
  const SelectionHeader& header_;
  const int64_t group_;
  std::vector<PageStep> steps_;
  std::vector<Query> total_;    // [num_rows * group], closed segments
  std::vector<Query> segment_;  // [num_rows * group]
  std::vector<PartialOutput> closed_, open_;
  HostBuffer ending_;  // of EarlyEnd
};

template <typename Activation, typename Kv>
void Run(const AttendParams& p, Executor& executor) {
  executor.ParallelFor(p.selection.num_rows,
                       [&](int64_t row, int) { Row<Activation, Kv>(p, row).Run(); });
}

}  // namespace

void AttendReference(const AttendParams& p, Executor& executor) {
  std::fill(p.unread.begin(), p.unread.end(), UnreadPages{});
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (p.q.dtype() == DType::kFloat32) {
    wide_kv ? Run<float, float>(p, executor) : Run<float, BFloat16>(p, executor);
  } else {
    wide_kv ? Run<BFloat16, float>(p, executor) : Run<BFloat16, BFloat16>(p, executor);
  }
}

}  // namespace kvasir::kernels
