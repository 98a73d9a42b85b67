// The tensors of a model folder in safetensors form: `model.safetensors`, or the shards that
// `model.safetensors.index.json` lists. Opening reads and checks every header and no data. Reading
// takes a slice of one tensor, so that a rank reads only its own part. It hides files, shards and
// offsets. Called by weights.h and model_hash.h. Thread-safe after Open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "worker/checkpoint/input_file.h"
#include "worker/checkpoint/safetensors_header.h"

namespace kvasir::worker {

// Rows [row_begin, row_end) and columns [col_begin, col_end) of a tensor seen as the matrix
// [first dimension, product of the others]; a scalar is [1, 1].
struct MatrixSlice {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;

  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
};

// One open file with a checked header.
class SafetensorsFile {
 public:
  // INVALID_ARGUMENT with the path, the tensor, the value found and the value expected.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const TensorMap& tensors() const { return tensors_; }
  const std::string& header() const { return header_; }
  int64_t data_size_bytes() const { return file_.size_bytes() - data_offset_; }
  const std::string& path() const { return file_.path(); }
  // Offsets count from the start of the data.
  absl::Status ReadData(int64_t offset, int64_t size, void* out) const {
    return file_.ReadAt(data_offset_ + offset, size, out);
  }

 private:
  SafetensorsFile(InputFile file, std::string header, TensorMap tensors)
      : file_(std::move(file)),
        header_(std::move(header)),
        tensors_(std::move(tensors)),
        data_offset_(8 + static_cast<int64_t>(header_.size())) {}

  InputFile file_;
  std::string header_;
  TensorMap tensors_;
  int64_t data_offset_;
};

class SafetensorsFolder {
 public:
  // The single file takes precedence where both forms exist, as in transformers. Shards: the index
  // and the files must agree on every tensor, and each file name must be a plain name inside the
  // folder.
  static absl::StatusOr<SafetensorsFolder> Open(const std::string& folder);

  // nullptr when there is no such tensor.
  const TensorInfo* Find(absl::string_view name) const;
  const TensorMap& tensors() const { return tensors_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

  // Reads a slice, row by row without gaps, in the tensor's own dtype. REQUIRES: the slice lies
  // within the tensor, and `out` has exactly its size. NOT_FOUND for an unknown tensor;
  // UNIMPLEMENTED when the dtype is not F32, BF16 or F16; DATA_LOSS when the file has shrunk.
  absl::Status ReadSlice(absl::string_view name, const MatrixSlice& slice,
                         std::span<std::byte> out) const;

 private:
  struct ShardIndex;
  static absl::StatusOr<ShardIndex> ReadShardIndex(const std::string& path);

  absl::Status AddFile(const std::string& path);
  absl::Status AddShards(const std::string& folder, const ShardIndex& index);

  std::vector<SafetensorsFile> files_;
  TensorMap tensors_;
};

}  // namespace kvasir::worker
