#include "coordinator/request/generate_stream.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

v1::GenerateResponse Tokens(const std::string& text) {
  v1::GenerateResponse response;
  response.mutable_tokens()->add_token_ids(1);
  response.mutable_tokens()->set_text(text);
  return response;
}

// A stream that gRPC has not bound: its first write stays in flight for ever, like a write to a
// client that does not read.
class UnreadStreamTest : public ::testing::Test {
 protected:
  UnreadStreamTest() {
    stream_->set_on_cancel([this](const absl::Status& why) {
      ++cancelled_;
      EXPECT_EQ(why.code(), absl::StatusCode::kResourceExhausted);
    });
  }
  ~UnreadStreamTest() override { stream_->OnDone(); }

  std::shared_ptr<GenerateStream> stream_ =
      GenerateStream::Create(nullptr, nullptr, absl::Hours(1), AsItComes);
  int cancelled_ = 0;
};

TEST_F(UnreadStreamTest, AnAnswerOfLessThanTheCapWaits) {
  for (int i = 0; i < 1000; ++i) stream_->Write(Tokens(std::string(1000, 'x')));
  EXPECT_EQ(cancelled_, 0);
}

TEST_F(UnreadStreamTest, MoreThanTheCapCancelsTheRequestOnce) {
  for (int i = 0; i < 3000; ++i) stream_->Write(Tokens(std::string(1000, 'x')));
  EXPECT_EQ(cancelled_, 1);
}

// Bug: they were counted as a seventh of their bytes in memory.
TEST_F(UnreadStreamTest, LogprobsCountAsTheyLieInMemory) {
  v1::GenerateResponse response = Tokens("x");
  v1::TokenLogprobs& logprobs = *response.mutable_tokens()->add_logprobs();
  for (int i = 0; i < 20; ++i) logprobs.add_top()->set_logprob(-1.0f);
  size_t in_memory = 0;
  for (; cancelled_ == 0; in_memory += response.tokens().logprobs(0).SpaceUsedLong()) {
    stream_->Write(response);
    ASSERT_LT(in_memory, 2 * GenerateStream::kMaxWaitingBytes);
  }
  EXPECT_GT(in_memory, GenerateStream::kMaxWaitingBytes / 2);
}

TEST_F(UnreadStreamTest, LogprobsOfPromptsCount) {
  v1::GenerateResponse response;
  v1::PromptLogprobs& scores = *response.mutable_prompt_logprobs();
  for (int i = 0; i < 512; ++i) scores.add_logprobs(-1);
  for (int i = 0; i < 512 * 20; ++i) scores.add_top_token_ids(7), scores.add_top_logprobs(-1);
  int written = 0;
  for (; cancelled_ == 0; ++written) {
    stream_->Write(response);
    ASSERT_LT(written, 100);
  }
  EXPECT_GE(written, 8) << "a client may miss several of the largest messages";
}

TEST_F(UnreadStreamTest, ProgressCostsNothing) {
  v1::GenerateResponse progress;
  progress.mutable_progress()->set_request_id(std::string(128, 'r'));
  for (int i = 0; i < 100000; ++i) stream_->Write(progress);
  EXPECT_EQ(cancelled_, 0);
}

}  // namespace
}  // namespace kvasir::coordinator
