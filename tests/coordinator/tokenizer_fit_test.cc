#include "coordinator/tokenizer_fit.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {
namespace {

class TokenizerFitTest : public ::testing::Test {
 protected:
  std::string Refusal(const ModelFolder& folder) const {
    const absl::Status status = CheckTokenizerFits(*tokenizer_, folder);
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  }
  const std::unique_ptr<const Tokenizer> tokenizer_ = *Tokenizer::Parse(MinimalJson().dump());
  const int64_t tokens_ = tokenizer_->vocab_size();
};

TEST_F(TokenizerFitTest, ThatOfTheModelFits) {
  EXPECT_EQ(Refusal({}), "");
  EXPECT_EQ(Refusal({.eos_token_ids = {0}, .vocab_size = tokens_}), "");
  EXPECT_EQ(Refusal({.eos_token_ids = {0}, .vocab_size = 2 * tokens_}), "");  // padding
}

TEST_F(TokenizerFitTest, IdsBeyondTheVocabularyAreRefused) {
  const std::string message = Refusal({.vocab_size = tokens_ - 1});
  EXPECT_NE(message.find(absl::StrCat("has the token ", tokens_ - 1)), std::string::npos)
      << message;
}

TEST_F(TokenizerFitTest, TokensForLessThanHalfOfTheVocabularyAreRefused) {
  EXPECT_NE(Refusal({.vocab_size = 2 * tokens_ + 2}).find("it has "), std::string::npos);
}

TEST_F(TokenizerFitTest, AnEndOfTextThatIsNoTokenIsRefused) {
  const std::string message =
      Refusal({.eos_token_ids = {0, static_cast<int32_t>(tokens_)}, .vocab_size = 2 * tokens_});
  EXPECT_NE(message.find(absl::StrCat("eos_token_id is ", tokens_)), std::string::npos) << message;
}

}  // namespace
}  // namespace kvasir::coordinator
