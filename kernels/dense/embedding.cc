#include "kernels/dense/embedding.h"

#include <cstring>

#include "absl/strings/str_cat.h"

#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/op_checks.h"

// The CPU code is three lines, so it has no file of its own.
namespace kvasir::kernels {

absl::Status CheckEmbedding(const EmbeddingParams& params) {
  ShapeCheck check("embedding");
  check.Match("table", params.table, {"num_rows", "dim"})
      .Match("ids", params.ids, {"tokens"}, DType::kInt32)
      .Match("y", params.y, {"tokens", "dim"}, params.table.dtype());
  return check.status();
}

absl::Status Embedding(const EmbeddingParams& params) {
  KVASIR_RETURN_IF_ERROR(CheckEmbedding(params));
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("embedding", {params.table, params.ids, params.y}));

  const auto* ids = params.ids.As<int32_t>();
  const int64_t num_rows = params.table.dim(0);
  const int64_t tokens = params.ids.dim(0);
  for (int64_t t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || ids[t] >= num_rows) {
      return absl::OutOfRangeError(absl::StrCat("embedding: id ", ids[t], " at index ", t,
                                                " is not a row of a table of ", num_rows));
    }
  }
  const int64_t row_bytes =
      params.table.dim(1) * static_cast<int64_t>(DTypeSize(params.table.dtype()));
  for (int64_t t = 0; t < tokens && row_bytes > 0; ++t) {
    std::memcpy(params.y.As<std::byte>() + t * row_bytes,
                params.table.As<std::byte>() + ids[t] * row_bytes, static_cast<size_t>(row_bytes));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
