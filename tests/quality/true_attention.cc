#include "tests/quality/true_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace kvasir::quality {
namespace {

using kernels::BFloat16;
using kernels::DType;
using kernels::kPageTokens;

void LoadFloats(const std::byte* from, DType dtype, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = dtype == DType::kFloat32
                ? reinterpret_cast<const float*>(from)[i]
                : static_cast<float>(reinterpret_cast<const BFloat16*>(from)[i]);
  }
}

HeadKv LoadHead(const kernels::SelectParams& params, int64_t head, int64_t num_tokens) {
  const kernels::KvLayout& layout = params.kv.layout;
  HeadKv kv;
  kv.keys.resize(static_cast<size_t>(num_tokens * layout.head_dim));
  kv.values.resize(kv.keys.size());
  for (int64_t begin = 0; begin < num_tokens; begin += kPageTokens) {
    const int64_t count = std::min(kPageTokens, num_tokens - begin) * layout.head_dim;
    const std::byte* page =
        params.kv.Peek(params.tiles[0].slot, begin / kPageTokens, params.layer, head).page();
    LoadFloats(page, layout.dtype, count, kv.keys.data() + begin * layout.head_dim);
    LoadFloats(page + layout.v_offset(), layout.dtype, count,
               kv.values.data() + begin * layout.head_dim);
  }
  return kv;
}

// In eight partial sums, which the compiler makes one vector.
float Dot(const float* a, const float* b, int64_t n) {
  float sums[8] = {};
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (int64_t i = n / 8 * 8; i < n; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(sums, sums + 8, 0.0f);
}

}  // namespace

Middle Middle::Of(const kernels::PolicyNumbers& numbers, int64_t p) {
  const int64_t end = std::max<int64_t>(0, p - numbers.window_tokens + 1);
  return {.begin = std::min(numbers.sink_tokens, end), .end = end};
}

QueryAttention::QueryAttention(std::vector<float> query, const HeadKv& kv, int64_t num_tokens,
                               float scale)
    : query_(std::move(query)), kv_(kv) {
  const int64_t d = std::ssize(query_);
  logits_.resize(static_cast<size_t>(num_tokens));
  for (int64_t t = 0; t < num_tokens; ++t) {
    logits_[static_cast<size_t>(t)] = scale * Dot(query_.data(), kv.keys.data() + t * d, d);
  }
  const double largest = *std::max_element(logits_.begin(), logits_.end());
  for (const float logit : logits_) weights_.push_back(std::exp(logit - largest));
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  for (double& weight : weights_) weight /= sum;
  std::vector<int32_t> all(weights_.size());
  std::iota(all.begin(), all.end(), 0);
  output_ = Output(all);
}

double QueryAttention::MassAround(const Middle& middle) const {
  return std::accumulate(weights_.begin(), weights_.begin() + middle.begin, 0.0) +
         std::accumulate(weights_.begin() + middle.end, weights_.end(), 0.0);
}

const std::vector<int32_t>& QueryAttention::MiddleByWeight(const Middle& middle) {
  if (ranked_middle_.begin == middle.begin && ranked_middle_.end == middle.end) return ranked_;
  ranked_middle_ = middle;
  ranked_.resize(static_cast<size_t>(middle.end - middle.begin));
  std::iota(ranked_.begin(), ranked_.end(), static_cast<int32_t>(middle.begin));
  std::sort(ranked_.begin(), ranked_.end(), [this](int32_t a, int32_t b) {
    const float x = logits_[static_cast<size_t>(a)], y = logits_[static_cast<size_t>(b)];
    return x != y ? x > y : a > b;
  });
  return ranked_;
}

std::vector<double> QueryAttention::Output(std::span<const int32_t> tokens) const {
  std::vector<double> output(query_.size());
  double sum = 0;
  for (const int32_t token : tokens) {
    const double weight = weights_[static_cast<size_t>(token)];
    const float* value = kv_.values.data() + static_cast<size_t>(token) * output.size();
    for (size_t i = 0; i < output.size(); ++i) output[i] += weight * static_cast<double>(value[i]);
    sum += weight;
  }
  for (double& x : output) x /= sum;
  return output;
}

double QueryAttention::OutputError(std::span<const int32_t> tokens) const {
  const std::vector<double> output = Output(tokens);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    difference += (output[i] - output_[i]) * (output[i] - output_[i]);
    norm += output_[i] * output_[i];
  }
  return std::sqrt(difference / norm);
}

LayerAttention::LayerAttention(const kernels::SelectParams& params, kernels::Executor& executor)
    : layer(params.layer),
      num_steps(std::ssize(params.tiles)),
      num_heads(params.q.dim(1)),
      num_kv_heads(params.kv.layout.num_kv_heads) {
  const int64_t d = params.q.dim(2);
  const int64_t element_bytes = static_cast<int64_t>(DTypeSize(params.q.dtype()));
  const int64_t num_tokens = params.tiles.back().first_position + 1;
  kv.resize(static_cast<size_t>(num_kv_heads));
  executor.ParallelFor(num_kv_heads, [&](int64_t head, int) {
    kv[static_cast<size_t>(head)] = LoadHead(params, head, num_tokens);
  });
  queries.resize(static_cast<size_t>(num_steps * num_heads));
  executor.ParallelFor(num_steps * num_heads, [&](int64_t i, int) {
    const int64_t head = i % num_heads;
    const kernels::QueryTile& tile = params.tiles[static_cast<size_t>(i / num_heads)];
    std::vector<float> query(static_cast<size_t>(d));
    const int64_t offset = (tile.first_row * num_heads + head) * d;
    LoadFloats(params.q.As<std::byte>() + offset * element_bytes, params.q.dtype(), d,
               query.data());
    queries[static_cast<size_t>(i)] =
        std::make_unique<QueryAttention>(std::move(query), kv[static_cast<size_t>(kv_head(head))],
                                         tile.first_position + 1, params.scale);
  });
}

}  // namespace kvasir::quality
