// One Tokenizer serves many threads; meant for ThreadSanitizer.
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {
namespace {

std::string Repeated(const std::string& part) {
  std::string out;
  for (int i = 0; i < 40; ++i) out += part;
  return out;
}

TEST(TokenizerThreadsTest, ManyThreadsMayEncodeAtOnce) {
  const auto tokenizer = Tokenizer::Load("tests/coordinator/tokenizer/golden/qwen2");
  ASSERT_TRUE(tokenizer.ok());
  const std::string text =
      Repeated("Mixed text, e\u0301 123 日本語 <think> and\n\n  more!") + std::string(500, '!');
  const std::vector<int32_t> expected = *(*tokenizer)->Encode(text);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        EXPECT_EQ(*(*tokenizer)->Encode(text), expected);
        EXPECT_TRUE((*tokenizer)->Decode(expected, SpecialTokens::kKeep).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvasir::coordinator
