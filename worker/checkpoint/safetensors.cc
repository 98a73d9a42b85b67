#include "worker/checkpoint/safetensors.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/strict_json.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
constexpr size_t kMaxShards = 512;  // each stays open
constexpr size_t kMaxFileNameChars = 255;

constexpr char kSingleFile[] = "/model.safetensors";
constexpr char kIndexFile[] = "/model.safetensors.index.json";

std::string Quote(const std::string& text) { return QuoteForMessage({text.data(), text.size()}); }

absl::Status WithPath(const absl::Status& status, const std::string& path) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::StatusOr<int64_t> ReadHeaderLength(const InputFile& file) {
  if (file.size_bytes() < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": has ", file.size_bytes(),
                                                   " bytes, expected a safetensors file of at "
                                                   "least 8"));
  }
  unsigned char bytes[kLengthBytes] = {};
  KVASIR_RETURN_IF_ERROR(file.ReadAt(0, kLengthBytes, bytes));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | bytes[i];
  const int64_t limit = std::min(kMaxSafetensorsHeaderBytes, file.size_bytes() - kLengthBytes);
  if (length > static_cast<uint64_t>(limit)) {
    return absl::InvalidArgumentError(absl::StrCat(
        file.path(), ": the header claims ", length, " bytes, expected at most ", limit,
        limit == kMaxSafetensorsHeaderBytes ? " (the limit of headers)"
                                            : " (the rest of the file)"));
  }
  return static_cast<int64_t>(length);
}

bool IsPlainFileName(const std::string& name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  };
  return name.size() <= kMaxFileNameChars && absl::EndsWith(name, ".safetensors") &&
         std::all_of(name.begin(), name.end(), is_plain);
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
  KVASIR_ASSIGN_OR_RETURN(const int64_t length, ReadHeaderLength(file));
  std::string header(static_cast<size_t>(length), '\0');
  KVASIR_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, length, header.data()));
  absl::StatusOr<TensorMap> tensors =
      ParseSafetensorsHeader(header, file.size_bytes() - kLengthBytes - length);
  if (!tensors.ok()) return WithPath(tensors.status(), path);
  return SafetensorsFile(std::move(file), std::move(header), *std::move(tensors));
}

// Tensor name -> file name, and all file names in order.
struct SafetensorsFolder::ShardIndex {
  std::string path;
  std::map<std::string, std::string> weight_map;
  std::set<std::string> files;
};

absl::StatusOr<SafetensorsFolder::ShardIndex> SafetensorsFolder::ReadShardIndex(
    const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxIndexBytes));
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json json, ParseStrictJson(text, path));
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected an object weight_map"));
  }
  ShardIndex index{.path = path, .weight_map = {}, .files = {}};
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": ", Quote(name), " is in ", ValueForMessage(file),
                       ", expected the plain name of a .safetensors file in this folder"));
    }
    index.files.insert(file.get_ref<const std::string&>());
    index.weight_map[name] = file.get_ref<const std::string&>();
  }
  if (index.files.size() > kMaxShards ||
      static_cast<int64_t>(index.weight_map.size()) > kMaxSafetensorsTensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": lists ", index.weight_map.size(), " tensors in ", index.files.size(),
                     " files, expected at most ", kMaxSafetensorsTensors, " in ", kMaxShards));
  }
  return index;
}

absl::StatusOr<SafetensorsFolder> SafetensorsFolder::Open(const std::string& folder) {
  SafetensorsFolder result;
  const absl::Status single = result.AddFile(folder + kSingleFile);
  if (!absl::IsNotFound(single)) {
    KVASIR_RETURN_IF_ERROR(single);
    return result;
  }
  const absl::StatusOr<ShardIndex> index = ReadShardIndex(folder + kIndexFile);
  if (absl::IsNotFound(index.status())) {
    return absl::NotFoundError(absl::StrCat(
        folder, ": expected model.safetensors or model.safetensors.index.json, found neither"));
  }
  KVASIR_RETURN_IF_ERROR(index.status());
  KVASIR_RETURN_IF_ERROR(result.AddShards(folder, *index));
  return result;
}

absl::Status SafetensorsFolder::AddShards(const std::string& folder, const ShardIndex& index) {
  for (const std::string& file : index.files) {
    KVASIR_RETURN_IF_ERROR(AddFile(absl::StrCat(folder, "/", file)));
    for (const auto& [name, info] : files_.back().tensors()) {
      const auto it = index.weight_map.find(name);
      if (it == index.weight_map.end() || it->second != file) {
        return absl::InvalidArgumentError(
            absl::StrCat(index.path, ": ", Quote(name), " lies in ", file, ", but the index ",
                         it == index.weight_map.end() ? "does not list it" : "says " + it->second));
      }
    }
  }
  for (const auto& [name, file] : index.weight_map) {
    if (Find(name) == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(index.path, ": says that ", Quote(name),
                                                     " lies in ", file, ", but it does not"));
    }
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFolder::AddFile(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  for (const auto& [name, info] : file.tensors()) {
    TensorInfo& added = tensors_[name] = info;
    added.file_index = static_cast<int64_t>(files_.size());
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

const TensorInfo* SafetensorsFolder::Find(absl::string_view name) const {
  const auto it = tensors_.find(std::string(name));
  return it == tensors_.end() ? nullptr : &it->second;
}

absl::Status SafetensorsFolder::ReadSlice(absl::string_view name, const MatrixSlice& slice,
                                          std::span<std::byte> out) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) {
    return absl::NotFoundError(absl::StrCat("no tensor ", QuoteForMessage(name)));
  }
  const SafetensorsFile& file = files_[static_cast<size_t>(info->file_index)];
  if (!info->dtype.has_value()) {
    return absl::UnimplementedError(absl::StrCat(file.path(), ": ", QuoteForMessage(name), " is ",
                                                 info->DebugString(),
                                                 ", expected F32, BF16 or F16"));
  }
  const int64_t element = static_cast<int64_t>(kernels::DTypeSize(*info->dtype));
  const int64_t elements = (info->data_end - info->data_begin) / element;
  const int64_t rows = info->shape.empty() ? 1 : info->shape[0];
  const int64_t cols = rows == 0 ? 0 : elements / rows;
  KVASIR_CHECK(0 <= slice.row_begin && slice.row_begin <= slice.row_end && slice.row_end <= rows);
  KVASIR_CHECK(0 <= slice.col_begin && slice.col_begin <= slice.col_end && slice.col_end <= cols);
  const int64_t slice_row_bytes = slice.cols() * element;
  KVASIR_CHECK(static_cast<int64_t>(out.size()) == slice.rows() * slice_row_bytes);

  const int64_t begin = info->data_begin + (slice.row_begin * cols + slice.col_begin) * element;
  if (slice.cols() == cols) {  // rows are adjacent in the file
    return file.ReadData(begin, static_cast<int64_t>(out.size()), out.data());
  }
  for (int64_t row = 0; row < slice.rows(); ++row) {
    KVASIR_RETURN_IF_ERROR(file.ReadData(begin + row * cols * element, slice_row_bytes,
                                         out.data() + row * slice_row_bytes));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
