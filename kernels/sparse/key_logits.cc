#include "kernels/sparse/key_logits.h"

#include <atomic>
#include <limits>

#include "kernels/paged/key_codes.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kLogitLanes = 16;

template <typename Kv>
float Dot(const float* a, const Kv* b, int64_t n) {
  float lanes[kLogitLanes] = {};
  int64_t i = 0;
  for (; i + kLogitLanes <= n; i += kLogitLanes) {
    for (int64_t lane = 0; lane < kLogitLanes; ++lane) {
      lanes[lane] += a[i + lane] * static_cast<float>(b[i + lane]);
    }
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += a[i] * static_cast<float>(b[i]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void LoadQuery(const SelectRow& row, int64_t r, int64_t g, float* to) {
  const int64_t d = row.p.kv.layout.head_dim;
  const int64_t begin = row.q_row(r, g) * d;
  for (int64_t i = 0; i < d; ++i) {
    to[i] = row.p.q.dtype() == DType::kFloat32
                ? row.p.q.As<const float>()[begin + i]
                : static_cast<float>(row.p.q.As<const BFloat16>()[begin + i]);
  }
}

void RotateToDistance(const SelectRow& row, int64_t distance, float* query) {
  const RopePositions* rope = row.p.rope;
  if (rope == nullptr) return;
  rope->Rotate(query, DType::kFloat32, 1, distance);
  // What rotating a key to position 0 would do.
  const auto scaling = static_cast<float>(rope->attention_scaling());
  for (int64_t i = 0; i < rope->head_dim(); ++i) query[i] *= scaling;
}

void LoadDistantQuery(const SelectRow& row, int64_t r, int64_t g, float* to) {
  LoadQuery(row, r, g, to);
  RotateToDistance(row, SelectionDistance(row.numbers, r), to);
}

KeyLogits::KeyLogits(const SelectRow& row) : row_(row), layout_(row.p.kv.layout) {}

float KeyLogits::operator()(const float* q, int64_t token) {
  const std::byte* key = Key(token);
  if (key == nullptr) return -std::numeric_limits<float>::infinity();
  return layout_.dtype == DType::kFloat32
             ? Dot(q, reinterpret_cast<const float*>(key), layout_.head_dim)
             : Dot(q, reinterpret_cast<const BFloat16*>(key), layout_.head_dim);
}

float KeyLogits::At(int64_t position, const float* q, int64_t token, float* key) {
  const std::byte* cached = Key(token);
  if (cached == nullptr) return -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < layout_.head_dim; ++i) {
    key[i] = layout_.dtype == DType::kFloat32
                 ? reinterpret_cast<const float*>(cached)[i]
                 : static_cast<float>(reinterpret_cast<const BFloat16*>(cached)[i]);
  }
  row_.p.rope->Rotate(key, DType::kFloat32, 1, position);
  return Dot(q, key, layout_.head_dim);
}

const std::byte* KeyLogits::Key(int64_t token) {
  const int64_t page = token / kPageTokens;
  if (page != page_) {
    page_ = page;
    const PageRef ref = row_.p.kv.Peek(row_.block.slot, page, row_.p.layer, row_.kv_head);
    memory_ = ref.page();
    if (ref.tier() == PageTier::kAbsent) {
      memory_ = nullptr;
      std::atomic_ref<uint8_t>(row_.p.faults[static_cast<size_t>(row_.block.slot)])
          .store(1, std::memory_order_relaxed);
    }
  }
  return memory_ == nullptr ? nullptr : memory_ + token % kPageTokens * layout_.row_bytes();
}

void KeyEstimates::Load(int64_t token) {
  const PagedKv& kv = row_.p.kv;
  const int64_t page = token / kPageTokens;
  is_there_ = kv.row(row_.block.slot, page) >= 0;
  if (!is_there_) return;
  DecodeKey(kv.layout, kv.KeyCodes(row_.block.slot, page, row_.p.layer, row_.kv_head),
            token % kPageTokens, key_);
}

void KeyEstimates::Rotate(int64_t position) {
  if (is_there_) row_.p.rope->Rotate(key_, DType::kFloat32, 1, position);
}

float KeyEstimates::operator()(const float* q) const {
  if (!is_there_) return -std::numeric_limits<float>::infinity();
  return Dot(q, key_, row_.p.kv.layout.head_dim);
}

}  // namespace kvasir::kernels
