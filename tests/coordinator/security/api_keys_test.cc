#include "coordinator/security/api_keys.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "openssl/sha.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr char kKey[] = "sk-0123456789abcdef0123456789abcdef";

std::string Sha256Of(const std::string& text) {
  std::string hash(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(hash.data()));
  return absl::BytesToHexString(hash);
}

std::string Entry(const std::string& name, const std::string& key, const std::string& more = "") {
  return absl::StrCat("  - {name: ", name, ", sha256: ", Sha256Of(key), ", tenant: ", name, "-t",
                      more, "}\n");
}

class ApiKeysTest : public ::testing::Test {
 protected:
  ApiKeysTest() : path_(absl::StrCat(::testing::TempDir(), "/keys-", getpid(), ".yaml")) {}
  ~ApiKeysTest() override { unlink(path_.c_str()); }

  void Write(const std::string& text) {
    const std::string draft = absl::StrCat(path_, ".new");
    std::ofstream(draft) << text;
    chmod(draft.c_str(), 0600);
    rename(draft.c_str(), path_.c_str());
  }
  std::unique_ptr<ApiKeys> Load(const std::string& entries) {
    Write(absl::StrCat("keys:\n", entries));
    absl::StatusOr<std::unique_ptr<ApiKeys>> keys = ApiKeys::Load(path_);
    EXPECT_EQ(keys.status(), absl::OkStatus());
    return *std::move(keys);
  }
  std::string RefusalOf(const std::string& text) {
    Write(text);
    return std::string(ApiKeys::Load(path_).status().message());
  }

  const std::string path_;
};

TEST_F(ApiKeysTest, AKeyIsKnownByItsHash) {
  const auto keys = Load(Entry("a", "another") + Entry("b", kKey));
  for (const char* scheme : {"Bearer ", "bearer ", "BEARER   "}) {
    const auto caller = keys->Authenticate(absl::StrCat(scheme, kKey));
    ASSERT_EQ(caller.status(), absl::OkStatus());
    EXPECT_EQ((*caller)->name(), "b");
    EXPECT_EQ((*caller)->Tenant(""), "b-t");
    EXPECT_EQ((*caller)->Tenant("salt"), "b-t:salt");
  }
  for (const std::string& header :
       {std::string(), std::string("Bearer"), std::string("Bearer "), absl::StrCat("Basic ", kKey),
        std::string(kKey), absl::StrCat("Bearer ", kKey, "0"),
        absl::StrCat("Bearer ", Sha256Of(kKey)), absl::StrCat("Bearer ", std::string(5000, 'x'))}) {
    EXPECT_EQ(keys->Authenticate(header).status().code(), absl::StatusCode::kUnauthenticated)
        << header;
  }
}

TEST_F(ApiKeysTest, AFileThatIsWrongIsRefusedWithItsPlace) {
  EXPECT_THAT(RefusalOf("keys: 5"), HasSubstr("a list 'keys'"));
  EXPECT_THAT(RefusalOf("more: 1\nkeys: []"), HasSubstr("nothing else"));
  EXPECT_THAT(RefusalOf("keys: [{name: a}]"), HasSubstr("key 1: name, sha256 and tenant"));
  EXPECT_THAT(RefusalOf("keys: [{name: a, key: b}]"), HasSubstr("key 1: there is no field key"));
  EXPECT_THAT(RefusalOf("keys: [{sha256: 12}]"), HasSubstr("64 hexadecimal digits"));
  EXPECT_THAT(RefusalOf("keys: [{tenant: 'a:b'}]"), HasSubstr("tenant must be 1 to 64 letters"));
  for (const char* field :
       {"concurrent-requests", "tokens-per-minute", "contexts", "context-tokens"}) {
    EXPECT_THAT(RefusalOf(absl::StrCat("keys: [{", field, ": 0}]")),
                HasSubstr(absl::StrCat(field, " must be at least 1")));
  }
  for (const char* size : {"0", "-1", "1e7", ".nan", ".inf", "1e-12"}) {
    EXPECT_THAT(RefusalOf(absl::StrCat("keys: [{kv-size-gb: ", size, "}]")),
                HasSubstr("kv-size-gb must be above 0 and at most 1e+06"))
        << size;
  }
  EXPECT_THAT(RefusalOf("keys: [{concurrent-requests: many}]"), HasSubstr("--api-keys-file"));
  EXPECT_THAT(RefusalOf("keys: ["), HasSubstr("--api-keys-file"));
  EXPECT_THAT(RefusalOf(absl::StrCat("keys:\n", Entry("a", "1"), Entry("a", "2"))),
              HasSubstr("key 2: a is there twice"));
  EXPECT_THAT(RefusalOf(absl::StrCat("keys:\n", Entry("a", "1"), Entry("b", "1"))),
              HasSubstr("key 2: its sha256 is there twice"));
  Write("keys: []");
  chmod(path_.c_str(), 0666);
  EXPECT_THAT(ApiKeys::Load(path_).status().message(), HasSubstr("chmod go-w"));
  unlink(path_.c_str());
  EXPECT_THAT(ApiKeys::Load(path_).status().message(), HasSubstr("cannot be read"));
}

// Bug: it aborted.
TEST_F(ApiKeysTest, AFolderIsNoFile) {
  ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
  const absl::Status status = ApiKeys::Load(path_).status();
  rmdir(path_.c_str());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("Is a directory"));
}

TEST_F(ApiKeysTest, AChangedFileIsInForceAndABadOneIsNot) {
  const auto keys = Load(Entry("a", "old"));
  const auto known = [&](const char* key) {
    return keys->Authenticate(absl::StrCat("Bearer ", key)).ok();
  };
  Write("keys: [");
  EXPECT_FALSE(keys->Reload().ok());
  EXPECT_TRUE(known("old"));
  Write(absl::StrCat("keys:\n", Entry("a", "new")));
  // The watch sees it by itself.
  for (int i = 0; i < 100 && !known("new"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_TRUE(known("new"));
  EXPECT_FALSE(known("old"));
}

class CallerTest : public ::testing::Test {
 protected:
  static std::shared_ptr<const Caller> Make(CallerLimits limits, const Caller* before = nullptr) {
    return std::make_shared<const Caller>("a", "t", limits, before);
  }
  static absl::Duration RetryOf(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    return proto::RetryDelay(status).value_or(absl::ZeroDuration());
  }
  const TimePoint start_ = TimePoint(seconds(1000));
};

TEST_F(CallerTest, KvOfRunningRequestsIsBounded) {
  const auto caller = Make({.kv_bytes = 3'000'000'000});
  const auto begin = [&](int64_t bytes) {
    return Caller::Begin(caller, {.prompt_tokens = 100, .max_tokens = 20, .kv_bytes = bytes},
                         start_);
  };
  auto first = begin(2'000'000'000);
  ASSERT_TRUE(first.ok());
  const absl::Status full = begin(1'000'000'001).status();
  EXPECT_GT(RetryOf(full), absl::ZeroDuration());
  EXPECT_EQ(full.message(),
            "the API key a may hold 3 GB of KV, of which 1 GB are free beside its 1 running "
            "requests, and this request may reach 1 GB (100 tokens of prompt, 20 of answer); lower "
            "max_tokens, or wait for one to end");
  auto second = begin(1'000'000'000);
  EXPECT_TRUE(second.ok());
  EXPECT_FALSE(begin(1).ok());
  first->reset();
  EXPECT_TRUE(begin(2'000'000'000).ok());
  const absl::Status never = begin(3'000'000'001).status();
  EXPECT_EQ(never.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(proto::RetryDelay(never).has_value());
  EXPECT_THAT(never.message(), HasSubstr("shorten the prompt or lower max_tokens"));
}

// A file that is read again may lower a limit below what is in use.
TEST_F(CallerTest, KvInUseOutlivesAChangeOfTheLimit) {
  const auto before = Make({.kv_bytes = 4'000'000'000});
  auto held = Caller::Begin(before, {.kv_bytes = 3'000'000'000}, start_);
  ASSERT_TRUE(held.ok());
  const auto after = Make({.kv_bytes = 2'000'000'000}, before.get());
  EXPECT_THAT(Caller::Begin(after, {.kv_bytes = 1}, start_).status().message(),
              HasSubstr("of which 0 GB are free"));
  held->reset();
  EXPECT_TRUE(Caller::Begin(after, {.kv_bytes = 2'000'000'000}, start_).ok());
}

TEST_F(CallerTest, RunningRequestsAreBounded) {
  const auto caller = Make({.concurrent_requests = 2});
  auto first = Caller::Begin(caller, {.prompt_tokens = 10}, start_);
  auto second = Caller::Begin(caller, {.prompt_tokens = 10}, start_);
  EXPECT_GT(RetryOf(Caller::Begin(caller, {.prompt_tokens = 10}, start_).status()),
            absl::ZeroDuration());
  first->reset();
  EXPECT_TRUE(Caller::Begin(caller, {.prompt_tokens = 10}, start_).ok());
}

TEST_F(CallerTest, TokensAreBoundedByTheMinute) {
  const auto caller = Make({.tokens_per_minute = 600});
  auto use = Caller::Begin(caller, {.prompt_tokens = 500}, start_);
  ASSERT_TRUE(use.ok());
  (*use)->AddTokens(400);  // 300 more than there are
  EXPECT_NEAR(
      absl::ToDoubleSeconds(RetryOf(Caller::Begin(caller, {.prompt_tokens = 1}, start_).status())),
      31, 0.1);
  EXPECT_FALSE(Caller::Begin(caller, {.prompt_tokens = 1}, start_ + seconds(29)).ok());
  EXPECT_TRUE(Caller::Begin(caller, {.prompt_tokens = 1}, start_ + seconds(31)).ok());
  // Time without requests saves no more than a minute's tokens.
  EXPECT_TRUE(Caller::Begin(caller, {.prompt_tokens = 600}, start_ + seconds(3600)).ok());
  EXPECT_FALSE(Caller::Begin(caller, {.prompt_tokens = 1}, start_ + seconds(3600)).ok());
}

TEST_F(CallerTest, ANewFileKeepsWhatIsInUse) {
  const auto caller = Make({.concurrent_requests = 1});
  const auto use = Caller::Begin(caller, {.prompt_tokens = 1}, start_);
  const auto changed = Make({.concurrent_requests = 1}, caller.get());
  EXPECT_FALSE(Caller::Begin(changed, {.prompt_tokens = 1}, start_).ok());
  EXPECT_TRUE(Caller::Begin(Make({.concurrent_requests = 1}), {.prompt_tokens = 1}, start_).ok());
}

}  // namespace
}  // namespace kvasir::coordinator
