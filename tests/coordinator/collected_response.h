// A sink that keeps the answer of one request, and a model to serve in tests: one token per byte,
// with 256 before and 257 after every text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "coordinator/request/parse_request.h"
#include "coordinator/request/response_sink.h"
#include "kernels/base/mutex.h"
#include "tests/coordinator/tokenizer/minimal_json.h"

namespace kvasir::coordinator {

class CollectedResponse : public ResponseSink {
 public:
  void Write(v1::GenerateResponse response) override {
    kernels::MutexLock lock(mu_);
    EXPECT_FALSE(status_.has_value()) << "written behind the end";
    messages_.push_back(std::move(response));
    changed_.NotifyAll();
  }
  void Close(const absl::Status& status) override {
    kernels::MutexLock lock(mu_);
    EXPECT_FALSE(status_.has_value()) << "ended twice";
    status_ = status;
    changed_.NotifyAll();
  }

  // Waits for the end, and returns its status.
  absl::Status status() {
    kernels::MutexLock lock(mu_);
    while (!status_.has_value()) changed_.Wait(mu_);
    return *status_;
  }
  bool closed() {
    kernels::MutexLock lock(mu_);
    return status_.has_value();
  }
  void AwaitMessages(size_t n) {
    kernels::MutexLock lock(mu_);
    while (messages_.size() < n && !status_.has_value()) changed_.Wait(mu_);
  }
  std::vector<v1::GenerateResponse> messages() {
    kernels::MutexLock lock(mu_);
    return messages_;
  }
  std::string text() {
    std::string text;
    for (const v1::GenerateResponse& message : messages()) text += message.tokens().text();
    return text;
  }
  std::vector<int32_t> token_ids() {
    std::vector<int32_t> ids;
    for (const v1::GenerateResponse& message : messages()) {
      if (!message.has_tokens()) continue;
      EXPECT_EQ(message.tokens().index(), ids.size());
      for (uint32_t id : message.tokens().token_ids()) ids.push_back(static_cast<int32_t>(id));
    }
    return ids;
  }
  // Returns the last message, which must be the Finish.
  v1::Finish finish() {
    const std::vector<v1::GenerateResponse> all = messages();
    EXPECT_TRUE(!all.empty() && all.back().has_finish());
    return all.empty() ? v1::Finish() : all.back().finish();
  }

 private:
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<v1::GenerateResponse> messages_ GUARDED_BY(mu_);
  std::optional<absl::Status> status_ GUARDED_BY(mu_);
};

struct TestModel {
  TestModel() {
    tokenizer = *Tokenizer::Parse(JsonWithTemplate().dump());
    v1::SparsityPolicy dense;
    dense.set_name("default");
    v1::SparsityPolicy quest;
    quest.set_name("quest");
    quest.mutable_decode()->mutable_quest();
    quest.mutable_decode()->set_window_tokens(64);
    quest.mutable_decode()->set_token_budget(128);
    policies = std::make_unique<PolicyTable>(*PolicyTable::Create({dense, quest}));
  }
  ServedModel served() const {
    return {.tokenizer = *tokenizer,
            .chat = chat,
            .policies = *policies,
            .eos_token_ids = eos_token_ids,
            .vocab_size = 258,
            .max_model_len = 1000,
            .trained_window = trained_window};
  }

  std::unique_ptr<const Tokenizer> tokenizer;
  ModelChat chat = {};
  std::unique_ptr<PolicyTable> policies;
  std::vector<int32_t> eos_token_ids = {257};
  int64_t trained_window = 0;
};

}  // namespace kvasir::coordinator
