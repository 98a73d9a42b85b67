// The header of one safetensors file: its grammar and a strict check of it. Pure: bytes in, tensors
// out, so that it can be fuzzed. It hides JSON. Called only by safetensors.h.
//
//   file   = length (8 bytes, little endian)  header (JSON, `length` bytes)  data
//   header = {"__metadata__": {text: text, ...}, name: {"dtype": D, "shape": [n, ...],
//             "data_offsets": [begin, end]}, ...}        offsets count from the start of the data
//
// The tensors' ranges must tile the data exactly: no overlap, no hole, nothing left over.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"

namespace kvasir::worker {

constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{16} << 20;
constexpr int64_t kMaxSafetensorsTensors = 20'000;
constexpr int64_t kMaxSafetensorsRank = 8;

struct TensorInfo {
  std::string dtype_name;                // as in the file: "BF16"
  std::optional<kernels::DType> dtype;   // absent: a dtype of the format that we do not read
  std::vector<int64_t> shape;            // empty for a scalar
  int64_t data_begin = 0, data_end = 0;  // bytes, [begin, end), from the start of the data
  int64_t file_index = 0;                // index in the folder's files; see SafetensorsFolder

  // "BF16[256, 64]"
  std::string DebugString() const;
};

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

// INVALID_ARGUMENT for every departure from the grammar and the limits above. `data_size_bytes` is
// the size of the file after the header. Allocates memory in proportion to the header, never to the
// sizes that it claims.
absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view header, int64_t data_size_bytes);

}  // namespace kvasir::worker
