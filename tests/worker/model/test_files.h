// Files for tests of this folder: a temporary folder, and safetensors files made from a list of
// tensors. Test-only; failures abort through std::filesystem's exceptions or KVASIR_CHECK.
#pragma once

#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include <nlohmann/json.hpp>

namespace kvasir::worker {

constexpr char kTestData[] = "tests/worker/model/testdata";

inline void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  KVASIR_CHECK(file.good());
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  KVASIR_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "kvasir_test_XXXXXX";
    KVASIR_CHECK(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct TestTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
};

inline std::string LittleEndian64(uint64_t value) {
  std::string bytes(8, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(value & 0xff);
    value >>= 8;
  }
  return bytes;
}

// The bytes of a file with a header given as text.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data) {
  return LittleEndian64(header.size()) + header + data;
}

inline std::string SafetensorsBytes(const std::vector<TestTensor>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const TestTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data += tensor.data;
  }
  return SafetensorsBytes(header.dump(), data);
}

}  // namespace kvasir::worker
