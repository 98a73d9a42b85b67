#include "coordinator/policy/limits.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"

#include "proto/kvasir/v1/contexts.pb.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using ::testing::HasSubstr;

bool HasRow(const FieldDescriptor& field) {
  for (const FieldLimit& limit : FieldLimits()) {
    if (limit.message == field.containing_type()->name() && limit.field == field.name())
      return true;
  }
  return false;
}

void ExpectRows(const Descriptor& type) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      ExpectRows(*field.message_type());
    } else {
      EXPECT_TRUE(HasRow(field)) << field.full_name() << " has no limit";
    }
  }
}

TEST(LimitsTest, EveryFieldOfEveryRequestHasALimit) {
  for (const Descriptor* of : {v1::GenerateRequest::descriptor(), v1::Context::descriptor()}) {
    const auto& service = *of->file()->service(0);
    ASSERT_GE(service.method_count(), 5);
    for (int i = 0; i < service.method_count(); ++i) ExpectRows(*service.method(i)->input_type());
  }
}

TEST(LimitsTest, EveryLimitNamesAField) {
  for (const FieldLimit& limit : FieldLimits()) {
    const Descriptor* type =
        google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(
            absl::StrCat("kvasir.v1.", limit.message));
    ASSERT_NE(type, nullptr) << limit.message;
    EXPECT_NE(type->FindFieldByName(std::string(limit.field)), nullptr) << limit.field;
  }
}

TEST(LimitsTest, AnEmptyRequestIsWithinThem) {
  EXPECT_EQ(CheckLimits("", v1::GenerateRequest()), absl::OkStatus());
}

// Every numeric field x edge values: values in the table's range pass, others are refused by name.
const double kEdges[] = {
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    1e-7,
    1e-6,
    63,
    64,
    65,
    99.999,
    100,
    100.5,
    127,
    128,
    129,
    255,
    256,
    1023,
    1024,
    1025,
    4095,
    4096,
    4097,
    65535,
    1048575,
    1048576,
    1048577,
    16777215,
    16777216,
    16777217,
    2147483647.0,
    2147483648.0,
    4294967295.0,
    1e18,
    1e38,
    std::numeric_limits<double>::quiet_NaN(),
    std::numeric_limits<double>::infinity(),
    -std::numeric_limits<double>::infinity(),
};

// Sets the field, and `held` to the value as its type holds it. False when it cannot hold it.
bool Set(Message& message, const FieldDescriptor& field, double value, double& held) {
  const Reflection& r = *message.GetReflection();
  const bool whole = std::isfinite(value) && value == std::floor(value) && value >= 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      held = static_cast<double>(static_cast<float>(value));
      r.SetFloat(&message, &field, static_cast<float>(value));
      return true;
    case FieldDescriptor::CPPTYPE_UINT32:
      if (!whole || value > 4294967295.0) return false;
      held = value;
      if (field.is_repeated()) {
        r.AddUInt32(&message, &field, static_cast<uint32_t>(value));
      } else {
        r.SetUInt32(&message, &field, static_cast<uint32_t>(value));
      }
      return true;
    case FieldDescriptor::CPPTYPE_UINT64:
      if (!whole || value > 1e19) return false;
      held = value;
      r.SetUInt64(&message, &field, static_cast<uint64_t>(value));
      return true;
    case FieldDescriptor::CPPTYPE_STRING: {  // `value` is the length
      if (!whole || value > 1 << 20) return false;
      held = value;
      const std::string text(static_cast<size_t>(value), 'a');
      if (field.is_repeated()) {
        r.AddString(&message, &field, text);
      } else {
        r.SetString(&message, &field, text);
      }
      return true;
    }
    default:
      return false;
  }
}

// Sets the names without which a message is refused, except `field`.
void SetOtherNames(Message& message, absl::string_view field) {
  const Descriptor& type = *message.GetDescriptor();
  for (const FieldLimit& limit : FieldLimits()) {
    if (limit.message != type.name() || limit.kind != LimitKind::kName || limit.field == field) {
      continue;
    }
    const FieldDescriptor& name = *type.FindFieldByName(std::string(limit.field));
    if (limit.min > 0 && !name.has_presence()) {
      message.GetReflection()->SetString(&message, &name, "p");
    }
  }
}

TEST(LimitsTest, EveryFieldTakesWhatIsInItsRangeAndNothingElse) {
  int checked = 0;
  for (const FieldLimit& limit : FieldLimits()) {
    if (limit.kind == LimitKind::kCount) continue;
    const Descriptor* type =
        google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(
            absl::StrCat("kvasir.v1.", limit.message));
    const FieldDescriptor& field = *type->FindFieldByName(std::string(limit.field));
    for (double edge : kEdges) {
      std::unique_ptr<Message> message(
          google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
      SetOtherNames(*message, limit.field);
      double held = 0;
      if (!Set(*message, field, edge, held)) continue;
      ++checked;
      const absl::Status status = CheckLimits("request", *message);
      // Other fields may be refused too, so look for the field that was set.
      const bool named =
          std::string(status.message()).find(std::string(limit.field)) != std::string::npos;
      EXPECT_EQ(status.ok() || !named, held >= limit.min && held <= limit.max)
          << limit.message << "." << limit.field << " = " << held << ": " << status;
    }
  }
  EXPECT_GT(checked, 400);
}

TEST(LimitsTest, CountsAreLimitedBeforeElementsAreLookedAt) {
  v1::SamplingParams sampling;
  for (int i = 0; i < 64; ++i) sampling.add_stop("x");
  EXPECT_EQ(CheckLimits("sampling", sampling), absl::OkStatus());
  sampling.add_stop("x");
  EXPECT_THAT(std::string(CheckLimits("sampling", sampling).message()),
              HasSubstr("sampling.stop has a number of elements of 65"));
  sampling.clear_stop();
  for (int i = 0; i < 257; ++i) sampling.add_stop_token_ids(1);
  EXPECT_EQ(CheckLimits("", sampling).code(), absl::StatusCode::kInvalidArgument);
}

TEST(LimitsTest, TheMessageNamesPathValueAndRange) {
  v1::GenerateRequest request;
  request.mutable_sampling()->set_temperature(101);
  EXPECT_EQ(std::string(CheckLimits("", request).message()),
            "sampling.temperature is 101; it must be in [0, 100]");
}

TEST(CheckPromptLengthTest, PromptAndAnswerFitTheContext) {
  EXPECT_EQ(CheckPromptLength(1, 99, 100), absl::OkStatus());
  EXPECT_EQ(CheckPromptLength(2, 99, 100).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckPromptLength(0, 1, 100).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(CheckPromptLength(3000001, 16, 8192).message()),
              HasSubstr("3000001 tokens"));
}

}  // namespace
}  // namespace kvasir::coordinator
