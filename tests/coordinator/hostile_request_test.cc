// Numbers and sizes that no request may have. Each is refused with INVALID_ARGUMENT, naming field,
// value and range, before anything is allocated from it: the test counts allocations of parsing.
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"

#include "coordinator/policy/limits.h"
#include "coordinator/request/parse_request.h"
#include "tests/coordinator/collected_response.h"
#include "tests/support/counting_allocator.h"

namespace kvasir::coordinator {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using kvasir::testing::AllocatedBytes;
using ::testing::HasSubstr;

// Most bytes that parsing a request of two characters may allocate, whatever its numbers are:
// messages, strings of errors.
constexpr size_t kMostBytes = 64 << 10;

constexpr double kEdges[] = {0,
                             -0.0,
                             1,
                             -1,
                             2,
                             -2,
                             0.5,
                             -0.5,
                             1e-45,
                             1e-7,
                             1e-6,
                             1.0000001,
                             2.0000002,
                             63,
                             64,
                             99.99999,
                             100,
                             100.00001,
                             -100.00001,
                             127,
                             128,
                             255,
                             1024,
                             1025,
                             4097,
                             65535,
                             65536,
                             1048576,
                             1048577,
                             16777216,
                             16777217,
                             2147483647.0,
                             2147483648.0,
                             4294967295.0,
                             1e18,
                             -1e18,
                             1e38,
                             3.4028234e38,
                             1e308,  // as float: infinity
                             std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()};
static_assert(std::size(kEdges) >= 40);

// Sets the field, or adds one element to a repeated field. Returns the value as the field holds it;
// nullopt when its type cannot hold the value, so that no client can send it.
std::optional<double> Set(Message& message, const FieldDescriptor& field, double value) {
  const auto& r = *message.GetReflection();
  const bool whole = std::isfinite(value) && value == std::floor(value) && value >= 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      r.SetFloat(&message, &field, static_cast<float>(value));
      return static_cast<double>(static_cast<float>(value));
    case FieldDescriptor::CPPTYPE_UINT32:
      if (!whole || value > 4294967295.0) return std::nullopt;
      field.is_repeated() ? r.AddUInt32(&message, &field, static_cast<uint32_t>(value))
                          : r.SetUInt32(&message, &field, static_cast<uint32_t>(value));
      return value + 0.0;  // -0 is held as 0
    case FieldDescriptor::CPPTYPE_UINT64:
      if (!whole || value > 1e19) return std::nullopt;
      r.SetUInt64(&message, &field, static_cast<uint64_t>(value));
      return value + 0.0;
    default:
      return std::nullopt;
  }
}

// Returns the part of a request that is a message of this type, and sets the fields it needs.
Message* Part(absl::string_view type, v1::GenerateRequest& request) {
  if (type == "SamplingParams") return request.mutable_sampling();
  if (type == "LogitBias") return request.mutable_sampling()->add_logit_bias();
  if (type == "AttentionPolicy") return request.mutable_policy()->mutable_decode_overrides();
  if (type == "TokenIds") return request.mutable_token_ids();
  return nullptr;
}

class HostileRequestTest : public ::testing::Test {
 protected:
  struct Outcome {
    absl::Status status;
    size_t bytes = 0;
  };
  Outcome Parse(const v1::GenerateRequest& request) {
    const size_t before = AllocatedBytes();
    const absl::StatusOr<ParsedRequest> parsed = ParseRequest(request, model_.served(), 1);
    return {.status = parsed.status(), .bytes = AllocatedBytes() - before};
  }
  void ExpectRefused(const v1::GenerateRequest& request, const std::string& message) {
    const Outcome outcome = Parse(request);
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(outcome.status.message()), HasSubstr(message));
    EXPECT_LT(outcome.bytes, kMostBytes) << message;
  }

  TestModel model_;
};

TEST_F(HostileRequestTest, EveryNumberOutOfItsRangeIsNamedWithValueAndRange) {
  int refused = 0, fields = 0;
  for (const FieldLimit& limit : FieldLimits()) {
    v1::GenerateRequest probe;
    if (limit.kind != LimitKind::kNumber || Part(limit.message, probe) == nullptr) continue;
    ++fields;
    for (const double edge : kEdges) {
      v1::GenerateRequest request;
      request.set_text("ab");
      Message& part = *Part(limit.message, request);
      const FieldDescriptor& field =
          *part.GetDescriptor()->FindFieldByName(std::string(limit.field));
      const std::optional<double> held = Set(part, field, edge);
      if (!held.has_value()) continue;
      const Outcome outcome = Parse(request);
      const std::string message(outcome.status.message());
      EXPECT_LT(outcome.bytes, kMostBytes) << limit.field << " = " << *held << ": " << message;
      EXPECT_TRUE(outcome.status.ok() || absl::IsInvalidArgument(outcome.status)) << outcome.status;
      if (*held >= limit.min && *held <= limit.max) continue;  // other checks may refuse it
      ++refused;
      EXPECT_FALSE(outcome.status.ok()) << limit.field << " = " << *held;
      EXPECT_THAT(message, HasSubstr(std::string(limit.field)));
      EXPECT_THAT(message, HasSubstr(absl::StrFormat(" is %.10g;", *held)));
      EXPECT_THAT(message,
                  HasSubstr(absl::StrFormat("must be in [%.10g, %.10g]", limit.min, limit.max)));
    }
  }
  EXPECT_GE(fields, 20);
  EXPECT_GE(refused, 200);
}

TEST_F(HostileRequestTest, APromptBeyondTheContextIsRefusedUncopied) {
  v1::GenerateRequest ids;
  ids.mutable_token_ids()->mutable_ids()->Resize(3'000'001, 1);
  ExpectRefused(ids, "the prompt has 3000001 tokens");
  v1::GenerateRequest text;
  text.set_text(std::string(size_t{30} << 20, 'x'));
  const Outcome outcome = Parse(text);
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(outcome.bytes, size_t{2} << 20) << "reading went on beyond the context";
  ExpectRefused({}, "none of text, chat and token_ids");
  v1::GenerateRequest empty;
  empty.set_text("");
  ExpectRefused(empty, "the prompt is empty");
}

TEST_F(HostileRequestTest, TokensOutsideTheVocabularyAreRefusedWhereverTheyStand) {
  for (const uint32_t id : {258u, 65536u, 2147483647u, 2147483648u, 4294967295u}) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    request.mutable_token_ids()->add_ids(id);
    ExpectRefused(request, absl::StrCat("ids[1] is ", id));
    v1::GenerateRequest stop;
    stop.set_text("ab");
    stop.mutable_sampling()->add_stop_token_ids(id);
    ExpectRefused(stop, absl::StrCat(id));
    v1::GenerateRequest bias;
    bias.set_text("ab");
    bias.mutable_sampling()->add_logit_bias()->set_token_id(id);
    ExpectRefused(bias, absl::StrCat(id));
  }
}

TEST_F(HostileRequestTest, ManyAndLongStopStringsAreRefused) {
  v1::GenerateRequest many;
  many.set_text("ab");
  for (int i = 0; i < 10'000; ++i) many.mutable_sampling()->add_stop("stop");
  ExpectRefused(many, "sampling.stop has a number of elements of 10000; it must be in [0, 64]");
  v1::GenerateRequest large;
  large.set_text("ab");
  large.mutable_sampling()->add_stop(std::string(1 << 20, 'x'));
  ExpectRefused(large, "sampling.stop[0] has a length in bytes of 1048576");
  // The largest number of the longest stop strings, all overlapping, is served.
  v1::GenerateRequest most;
  most.set_text("ab");
  for (size_t i = 0; i < 64; ++i) most.mutable_sampling()->add_stop(std::string(1024 - i, 'x'));
  EXPECT_EQ(Parse(most).status, absl::OkStatus());
  v1::GenerateRequest empty;
  empty.set_text("ab");
  empty.mutable_sampling()->add_stop("");
  ExpectRefused(empty, "sampling.stop[0] has a length in bytes of 0");
}

}  // namespace
}  // namespace kvasir::coordinator
