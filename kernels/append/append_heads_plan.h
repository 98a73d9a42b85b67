// Which kernel of append_heads_cuda.h serves a call. Needs no GPU.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

struct AppendHeadsShape {
  int64_t num_tokens = 0;
  int64_t num_tiles = 0;  // query tiles
  int64_t head_dim = 0;
  DType dtype = DType::kFloat32;  // of everything except the KV
  DType kv = DType::kFloat32;
};

struct AppendHeadsPlan {
  enum class Kernel {
    kElements,  // a thread has an element of a head, token by token: suits one token a tile
    kPrompt,    // a thread has sixteen bytes of each half, and a CTA many tokens at once
  };

  AppendHeadsShape shape;
  Kernel kernel = Kernel::kElements;
};

inline AppendHeadsPlan PlanAppendHeads(const AppendHeadsShape& shape) {
  const bool is_bf16 =
      shape.dtype == DType::kBFloat16 && (shape.kv == DType::kBFloat16 || IsQuantized(shape.kv));
  const bool is_prompt = shape.num_tokens > shape.num_tiles && is_bf16 &&
                         (shape.head_dim == 64 || shape.head_dim == 128);
  return {
      .shape = shape,
      .kernel = is_prompt ? AppendHeadsPlan::Kernel::kPrompt : AppendHeadsPlan::Kernel::kElements};
}

inline std::ostream& operator<<(std::ostream& out, const AppendHeadsPlan& plan) {
  const AppendHeadsShape& shape = plan.shape;
  return out << shape.num_tokens << " tokens in " << shape.num_tiles << " tiles, head_dim "
             << shape.head_dim << ", " << DTypeName(shape.dtype) << ", KV " << DTypeName(shape.kv)
             << ": "
             << (plan.kernel == AppendHeadsPlan::Kernel::kPrompt ? "kernel of prompts"
                                                                 : "kernel by elements");
}

}  // namespace kvasir::kernels
