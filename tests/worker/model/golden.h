// Logits that transformers computed (tests/model/golden_logits.py describes golden files and how
// they are made). Test-only; a broken file aborts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/safetensors.h"

namespace kvasir::worker {

// One run of transformers over `tokens`.
struct GoldenRun {
  std::vector<uint32_t> tokens;
  std::vector<int32_t> positions;          // ascending; the last is that of the last token
  std::vector<std::vector<float>> logits;  // of each position
};

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& path) : file_(SafetensorsFile::Open(path).value()) {}

  // Lengths of the runs, ascending.
  std::vector<int64_t> lengths() const {
    std::vector<int64_t> lengths;
    for (const auto& [name, info] : file_.tensors()) {
      int64_t length = 0;
      absl::string_view rest = {name.data(), name.size()};
      if (!absl::ConsumePrefix(&rest, "positions/")) continue;
      KVASIR_CHECK(absl::SimpleAtoi(rest, &length));
      lengths.push_back(length);
    }
    std::sort(lengths.begin(), lengths.end());
    return lengths;
  }

  GoldenRun Run(int64_t length) const {
    GoldenRun run = {.tokens = Read<uint32_t>("tokens"),
                     .positions = Read<int32_t>(absl::StrCat("positions/", length)),
                     .logits = {}};
    run.tokens.resize(static_cast<size_t>(length));
    const std::vector<float> logits = Read<float>(absl::StrCat("logits/", length));
    const auto vocab = static_cast<std::ptrdiff_t>(logits.size() / run.positions.size());
    for (auto row = logits.begin(); row != logits.end(); row += vocab) {
      run.logits.emplace_back(row, row + vocab);
    }
    return run;
  }

 private:
  template <typename T>
  std::vector<T> Read(const std::string& name) const {
    const auto found = file_.tensors().find(name);
    KVASIR_CHECK(found != file_.tensors().end());
    const int64_t size = found->second.data_end - found->second.data_begin;
    std::vector<T> values(static_cast<size_t>(size) / sizeof(T));
    KVASIR_CHECK(file_.ReadData(found->second.data_begin, size, values.data()).ok());
    return values;
  }

  SafetensorsFile file_;
};

// Returns how far the largest logit exceeds the second.
inline float TopTwoMargin(std::vector<float> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return logits[0] - logits[1];
}

inline int64_t ArgMax(const std::vector<float>& logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

struct LogitsDifference {
  float largest = 0;  // |difference|
  float scale = 0;    // largest |logit|

  void Add(const std::vector<float>& expected, const std::vector<float>& actual) {
    KVASIR_CHECK(expected.size() == actual.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      scale = std::max(scale, std::abs(expected[i]));
      // A NaN would compare as no difference, so it counts as infinite.
      const float difference = std::abs(expected[i] - actual[i]);
      largest = std::max(largest, std::isnan(difference) ? INFINITY : difference);
    }
  }
};

}  // namespace kvasir::worker
