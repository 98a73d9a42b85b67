#include "worker/checkpoint/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/strict_json.h"

namespace kvasir::worker {
namespace {

using nlohmann::json;

struct DTypeRow {
  const char* name;
  int64_t bits;
  std::optional<kernels::DType> dtype;
};

// Every dtype of the format. Those without a DType are accepted and listed, but not read.
constexpr DTypeRow kDTypes[] = {
    {"F32", 32, kernels::DType::kFloat32},
    {"BF16", 16, kernels::DType::kBFloat16},
    {"F16", 16, kernels::DType::kFloat16},
    {"BOOL", 8, std::nullopt},
    {"U8", 8, std::nullopt},
    {"I8", 8, std::nullopt},
    {"U16", 16, std::nullopt},
    {"I16", 16, std::nullopt},
    {"U32", 32, std::nullopt},
    {"I32", 32, std::nullopt},
    {"U64", 64, std::nullopt},
    {"I64", 64, std::nullopt},
    {"F64", 64, std::nullopt},
    {"C64", 64, std::nullopt},
    {"F8_E4M3", 8, std::nullopt},
    {"F8_E5M2", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},
};

const DTypeRow* FindDType(absl::string_view name) {
  const auto* row = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                 [name](const DTypeRow& r) { return r.name == name; });
  return row == std::end(kDTypes) ? nullptr : row;
}

// Returns nothing when the product passes 2^63 - 1.
std::optional<int64_t> SizeInBits(const std::vector<int64_t>& shape, int64_t bits_per_element) {
  int64_t product = bits_per_element;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(product, dim, &product)) return std::nullopt;
  }
  return product;
}

// Walks the header's JSON events. Each event either fits the grammar at this place or stops the
// parse with a status.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(int64_t data_size_bytes) : data_size_bytes_(data_size_bytes) {}

  const absl::Status& status() const { return status_; }
  TensorMap TakeTensors() { return std::move(tensors_); }

  bool start_object(size_t) override {
    if (place_ == Place::kOutside) return Go(Place::kTop);
    if (place_ != Place::kTop) return Unexpected("an object");
    if (name_ == "__metadata__") return Go(Place::kMetadata);
    tensor_ = PartialTensor();
    return Go(Place::kTensor);
  }

  bool end_object() override {
    if (place_ == Place::kTop) return Go(Place::kOutside);
    if (place_ == Place::kTensor && !FinishTensor()) return false;
    return Go(Place::kTop);
  }

  bool key(string_t& key) override {
    if (place_ == Place::kTensor) return TensorField(key);
    std::set<std::string>& seen = place_ == Place::kTop ? names_ : metadata_keys_;
    const absl::string_view what = place_ == Place::kTop ? "tensors" : "entries of __metadata__";
    if (static_cast<int64_t>(seen.size()) == kMaxSafetensorsTensors) {
      return Fail(absl::StrCat("more than ", kMaxSafetensorsTensors, " ", what));
    }
    if (!seen.insert(key).second) {
      return Fail(absl::StrCat("the name ", QuoteForMessage({key.data(), key.size()}),
                               " appears twice among the ", what));
    }
    if (place_ == Place::kTop) name_ = key;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor) return Unexpected("an array");
    if (field_ == "shape") return Go(Place::kShape);
    if (field_ == "data_offsets") return Go(Place::kOffsets);
    return Unexpected("an array");
  }

  bool end_array() override { return Go(Place::kTensor); }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || field_ != "dtype") return Unexpected("a text");
    tensor_.dtype = FindDType({value.data(), value.size()});
    if (tensor_.dtype != nullptr) return true;
    return Fail(absl::StrCat("dtype is ", QuoteForMessage({value.data(), value.size()}),
                             ", expected a dtype of the safetensors format such as BF16"));
  }

  bool number_unsigned(number_unsigned_t value) override {
    const std::string shown = absl::StrCat("the number ", value);
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Unexpected(shown);
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max())) {
      return Unexpected(shown);
    }
    std::vector<int64_t>& list = place_ == Place::kShape ? tensor_.shape : tensor_.offsets;
    const int64_t limit = place_ == Place::kShape ? kMaxSafetensorsRank : 2;
    if (static_cast<int64_t>(list.size()) == limit) {
      return Fail(absl::StrCat(field_, " has more than ", limit, " numbers"));
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override { return Unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    return Unexpected(absl::StrCat("the number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Unexpected(absl::StrCat("the number ", QuoteForMessage({text.data(), text.size()})));
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool parse_error(size_t, const std::string&, const json::exception&) override { return false; }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };

  struct PartialTensor {
    const DTypeRow* dtype = nullptr;
    std::vector<int64_t> shape, offsets;
    bool has_dtype = false, has_shape = false, has_offsets = false;
  };

  bool Go(Place place) {
    place_ = place;
    return true;
  }

  bool Fail(absl::string_view message) {
    const bool in_tensor = place_ != Place::kOutside && place_ != Place::kTop;
    status_ = absl::InvalidArgumentError(
        in_tensor ? absl::StrCat(QuoteForMessage({name_.data(), name_.size()}), ": ", message)
                  : absl::StrCat("safetensors header: ", message));
    return false;
  }

  bool Unexpected(absl::string_view found) {
    switch (place_) {
      case Place::kOutside:
        return Fail(absl::StrCat("is ", found, ", expected an object"));
      case Place::kTop:
        return Fail(absl::StrCat(QuoteForMessage({name_.data(), name_.size()}), " is ", found,
                                 ", expected an object"));
      case Place::kMetadata:
        return Fail(absl::StrCat("holds ", found, ", expected texts only"));
      case Place::kTensor:
        return Fail(absl::StrCat(field_, " is ", found, ", expected ",
                                 field_ == "dtype" ? "a text" : "an array"));
      case Place::kShape:
      case Place::kOffsets:
        return Fail(
            absl::StrCat(field_, " holds ", found, ", expected whole numbers from 0 to 2^63 - 1"));
    }
    return false;
  }

  bool TensorField(const std::string& key) {
    bool* seen = key == "dtype"          ? &tensor_.has_dtype
                 : key == "shape"        ? &tensor_.has_shape
                 : key == "data_offsets" ? &tensor_.has_offsets
                                         : nullptr;
    const std::string shown = QuoteForMessage({key.data(), key.size()});
    if (seen == nullptr) {
      return Fail(absl::StrCat("has the field ", shown, ", expected dtype, shape, data_offsets"));
    }
    if (*seen) return Fail(absl::StrCat("has the field ", shown, " twice"));
    *seen = true;
    field_ = key;
    return true;
  }

  bool FinishTensor() {
    if (tensor_.dtype == nullptr || !tensor_.has_shape || tensor_.offsets.size() != 2) {
      return Fail("expected a dtype, a shape and data_offsets of two numbers");
    }
    TensorInfo info{.dtype_name = tensor_.dtype->name,
                    .dtype = tensor_.dtype->dtype,
                    .shape = std::move(tensor_.shape),
                    .data_begin = tensor_.offsets[0],
                    .data_end = tensor_.offsets[1]};
    if (info.data_end < info.data_begin || info.data_end > data_size_bytes_) {
      return Fail(absl::StrCat("data_offsets are [", info.data_begin, ", ", info.data_end,
                               "], expected a range within the ", data_size_bytes_,
                               " bytes of data"));
    }
    const std::optional<int64_t> bits = SizeInBits(info.shape, tensor_.dtype->bits);
    if (!bits.has_value()) {
      return Fail(absl::StrCat("the size of ", info.DebugString(), " passes 2^63 bits"));
    }
    const int64_t found = info.data_end - info.data_begin;
    if (*bits % 8 != 0 || *bits / 8 != found) {
      return Fail(absl::StrCat("data_offsets hold ", found, " bytes, expected ", *bits,
                               " bits for ", info.DebugString()));
    }
    tensors_.emplace(name_, std::move(info));
    return true;
  }

  const int64_t data_size_bytes_;
  Place place_ = Place::kOutside;
  std::string name_;   // current key of the top object
  std::string field_;  // current key of the tensor's object
  PartialTensor tensor_;
  std::set<std::string> names_, metadata_keys_;
  TensorMap tensors_;
  absl::Status status_;
};

absl::Status CheckRangesTileData(const TensorMap& tensors, int64_t data_size_bytes) {
  std::vector<const TensorMap::value_type*> by_range;
  by_range.reserve(tensors.size());
  for (const auto& entry : tensors) by_range.push_back(&entry);
  std::sort(by_range.begin(), by_range.end(), [](const auto* a, const auto* b) {
    return std::tie(a->second.data_begin, a->second.data_end) <
           std::tie(b->second.data_begin, b->second.data_end);
  });
  int64_t end = 0;
  for (const auto* entry : by_range) {
    const auto& [name, info] = *entry;
    if (info.data_begin != end) {
      return absl::InvalidArgumentError(absl::StrCat(
          QuoteForMessage({name.data(), name.size()}), ": begins at byte ", info.data_begin,
          " of the data, expected ", end, " (", info.data_begin < end ? "an overlap" : "a hole",
          "): tensors must follow each other exactly"));
    }
    end = info.data_end;
  }
  if (end == data_size_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("safetensors header: the tensors end at byte ",
                                                 end, " of the data, expected ", data_size_bytes,
                                                 ": trailing bytes"));
}

}  // namespace

std::string TensorInfo::DebugString() const {
  return absl::StrCat(dtype_name, "[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<TensorMap> ParseSafetensorsHeader(absl::string_view header,
                                                 int64_t data_size_bytes) {
  if (static_cast<int64_t>(header.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors header has ", header.size(),
                                                   " bytes, expected at most ",
                                                   kMaxSafetensorsHeaderBytes));
  }
  // Also refuses what the JSON library skips: a byte order mark, leading white space.
  if (header.empty() || header.front() != '{') {
    return absl::InvalidArgumentError("safetensors header: expected it to begin with {");
  }
  HeaderReader reader(data_size_bytes);
  KVASIR_RETURN_IF_ERROR(ParseJsonEvents(header, "safetensors header", reader));
  KVASIR_RETURN_IF_ERROR(reader.status());
  TensorMap tensors = reader.TakeTensors();
  KVASIR_RETURN_IF_ERROR(CheckRangesTileData(tensors, data_size_bytes));
  return tensors;
}

}  // namespace kvasir::worker
