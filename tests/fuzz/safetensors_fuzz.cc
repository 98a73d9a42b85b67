// Input: the bytes of a safetensors file. What the reader accepts must tile its data and be
// readable to the last byte.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/safetensors.h"

namespace kvasir::worker {
namespace {

// A folder with one model file, rewritten for each input.
class ModelFolder {
 public:
  ModelFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("kvasir_safetensors_fuzz_" + std::to_string(getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~ModelFolder() { std::filesystem::remove_all(path_); }

  absl::StatusOr<SafetensorsFolder> Open(const uint8_t* data, size_t size) const {
    std::ofstream file(path_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
    file.close();
    KVASIR_CHECK(file.good());
    return SafetensorsFolder::Open(path_);
  }

 private:
  std::filesystem::path path_;
};

void ReadTensor(const SafetensorsFolder& folder, const std::string& name, const TensorInfo& info) {
  if (!info.dtype.has_value()) return;
  const int64_t size = info.data_end - info.data_begin;
  const int64_t elements = size / static_cast<int64_t>(kernels::DTypeSize(*info.dtype));
  const int64_t rows = info.shape.empty() ? 1 : info.shape[0];
  const int64_t cols = rows == 0 ? 0 : elements / rows;
  KVASIR_CHECK(rows * cols == elements);
  std::vector<std::byte> out(static_cast<size_t>(size));
  KVASIR_CHECK(
      folder.ReadSlice(name, {.row_end = rows, .col_begin = 0, .col_end = cols}, out).ok());
  if (cols > 1 && rows <= 4096) {
    out.resize(out.size() - out.size() / static_cast<size_t>(cols));
    KVASIR_CHECK(
        folder.ReadSlice(name, {.row_end = rows, .col_begin = 1, .col_end = cols}, out).ok());
  }
}

void CheckFile(const uint8_t* data, size_t size) {
  static const ModelFolder folder;
  const absl::StatusOr<SafetensorsFolder> model = folder.Open(data, size);
  if (!model.ok()) {
    KVASIR_CHECK(absl::IsInvalidArgument(model.status()) && model.status().message().size() < 600);
    return;
  }
  int64_t sum = 0;
  for (const auto& [name, info] : model->tensors()) {
    sum += info.data_end - info.data_begin;
    ReadTensor(*model, name, info);
  }
  KVASIR_CHECK(sum == model->files()[0].data_size_bytes());
}

}  // namespace
}  // namespace kvasir::worker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::worker::CheckFile(data, size);
  return 0;
}
