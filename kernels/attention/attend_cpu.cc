#include "kernels/attention/attend_cpu.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/attention/attention_state.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/compact_positions.h"

namespace kvasir::kernels {
namespace {

constexpr float kNoKey = -std::numeric_limits<float>::infinity();

// One query of one head, and what it has seen.
struct Query {
  std::vector<float> q;
  AttentionState state;
  std::vector<float> out;

  explicit Query(int64_t head_dim)
      : q(static_cast<size_t>(head_dim)), out(static_cast<size_t>(head_dim)) {}
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

// Adds the tokens of `mask` of one page. Tokens outside the mask are not read.
template <typename Kv>
void AddPage(int64_t head_dim, const std::byte* key_bytes, const std::byte* value_bytes,
             uint64_t mask, float scale, Query& query) {
  const Kv* keys = reinterpret_cast<const Kv*>(key_bytes);
  const Kv* values = reinterpret_cast<const Kv*>(value_bytes);
  const int64_t d = head_dim;
  float logits[kPageTokens];
  float max = query.state.max;
  for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
    const int t = std::countr_zero(rest);
    logits[t] = scale * Dot(query.q, keys + t * d);
    max = std::max(max, logits[t]);  // NaN is left out here and shows in the sum
  }
  // Before the first key max is -inf, and after NaN or -inf logits only it still is.
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

// One (query block, KV head).
template <typename Activation, typename Kv>
class Row {
 public:
  Row(const AttendParams& p, int64_t row)
      : p_(p),
        block_(p.blocks[static_cast<size_t>(row / p.kv.layout.num_kv_heads)]),
        kv_head_(row % p.kv.layout.num_kv_heads),
        header_(p.selection.header(row)),
        list_(p.selection.list(row)),
        total_(p.kv.layout.head_dim),
        segment_(p.kv.layout.head_dim) {}

  void Run() {
    ReadPages();
    const int64_t group = p_.q.dim(1) / p_.kv.layout.num_kv_heads;
    for (int64_t r = 0; r < block_.num_rows; ++r) {
      for (int64_t g = 0; g < group; ++g) {
        RunQuery(block_.first_position + r,
                 (block_.first_row + r) * p_.q.dim(1) + kv_head_ * group + g);
      }
    }
  }

 private:
  // A page of the selection with the tokens that the block's last query attends to.
  struct Page {
    int64_t page;
    uint64_t mask;
    const std::byte* keys;
    const std::byte* values;
    std::vector<std::byte> rotated_keys;  // empty: keys are those of the cache
  };

  void ReadPages() {
    const int64_t last_position = block_.first_position + block_.num_rows - 1;
    const int64_t token_bytes = 2 * p_.kv.layout.row_bytes();
    for (SelectedPages walk(header_, list_, last_position); walk.valid(); walk.Next()) {
      const PageRef ref = p_.kv.Read(block_.slot, walk.page(), p_.layer, kv_head_,
                                     std::popcount(walk.mask()) * token_bytes);
      if (ref.tier() == PageTier::kAbsent) {
        std::atomic_ref<uint8_t>(p_.faults[static_cast<size_t>(block_.slot)])
            .store(1, std::memory_order_relaxed);
        continue;
      }
      pages_.push_back({.page = walk.page(),
                        .mask = walk.mask(),
                        .keys = ref.page(),
                        .values = ref.page() + p_.kv.layout.v_offset(),
                        .rotated_keys = {}});
      if (p_.rope != nullptr) RotateKeysOf(pages_.back(), walk.entry());
    }
  }

  void RotateKeysOf(Page& page, const SelectionEntry* entry) {
    const KvLayout& layout = p_.kv.layout;
    page.rotated_keys.resize(static_cast<size_t>(layout.v_offset()));
    RotateKeys(*p_.rope, layout, header_,
               {.keys = page.keys, .page = page.page, .mask = page.mask, .entry = entry},
               page.rotated_keys.data());
    page.keys = page.rotated_keys.data();
  }

  void LoadQuery(const Activation* q, int64_t position) {
    std::vector<Activation> query(q, q + p_.kv.layout.head_dim);
    if (p_.rope != nullptr) {
      p_.rope->Rotate(query.data(), p_.q.dtype(), 1, QueryPosition(header_, position));
    }
    std::transform(query.begin(), query.end(), segment_.q.begin(),
                   [](Activation x) { return static_cast<float>(x); });
  }

  void RunQuery(int64_t position, int64_t q_row) {
    const int64_t d = p_.kv.layout.head_dim;
    LoadQuery(p_.q.As<const Activation>() + q_row * d, position);
    total_.Reset();
    segment_.Reset();
    for (size_t i = 0; i < pages_.size(); ++i) {
      const Page& page = pages_[i];
      if (i > 0 && page.page / kSegmentPages != pages_[i - 1].page / kSegmentPages) {
        Merge(total_, segment_);
        segment_.Reset();
      }
      const uint64_t causal = TokenMask(0, position + 1 - page.page * kPageTokens);
      AddPage<Kv>(d, page.keys, page.values, page.mask & causal, p_.scale, segment_);
    }
    Merge(total_, segment_);
    Activation* out = p_.out.As<Activation>() + q_row * d;
    const float sum = total_.state.sum;
    for (int64_t i = 0; i < d; ++i) {
      const float x = total_.out[static_cast<size_t>(i)];
      out[i] = static_cast<Activation>(sum == 0 ? 0.0f : x / sum);
    }
    if (!p_.lse.empty()) p_.lse.As<float>()[q_row] = LogSumExp(total_.state);
  }

  const AttendParams& p_;
  const QueryBlock& block_;
  const int64_t kv_head_;
  const SelectionHeader& header_;
  const SelectionEntry* list_;
  std::vector<Page> pages_;
  Query total_;
  Query segment_;
};

template <typename Activation, typename Kv>
void Run(const AttendParams& p, Executor& executor) {
  executor.ParallelFor(p.selection.num_rows,
                       [&](int64_t row, int) { Row<Activation, Kv>(p, row).Run(); });
}

}  // namespace

void AttendReference(const AttendParams& p, Executor& executor) {
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (p.q.dtype() == DType::kFloat32) {
    wide_kv ? Run<float, float>(p, executor) : Run<float, BFloat16>(p, executor);
  } else {
    wide_kv ? Run<BFloat16, float>(p, executor) : Run<BFloat16, BFloat16>(p, executor);
  }
}

}  // namespace kvasir::kernels
