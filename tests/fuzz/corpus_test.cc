// Replays the corpus KVASIR_CORPUS of the fuzzer that the program is linked with: the seeds, and
// inputs that once failed.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace kvasir {
namespace {

TEST(FuzzCorpusTest, EveryInputRunsClean) {
  int num_files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("tests/fuzz/corpus/" KVASIR_CORPUS)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string input(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size()),
              0);
    ++num_files;
  }
  EXPECT_GT(num_files, 8);
}

}  // namespace
}  // namespace kvasir
