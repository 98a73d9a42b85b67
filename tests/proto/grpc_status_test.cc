#include "proto/grpc_status.h"

#include "absl/strings/cord.h"
#include "gtest/gtest.h"

namespace kvasir::proto {
namespace {

TEST(GrpcStatusTest, CodeMessageAndPayloadsThereAndBack) {
  for (int code = 0; code <= 16; ++code) {
    absl::Status status(static_cast<absl::StatusCode>(code), "why");
    if (!status.ok()) status.SetPayload("type.googleapis.com/some.Type", absl::Cord("bytes"));
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
}

TEST(GrpcStatusTest, WithoutPayloadsThereAreNoDetails) {
  EXPECT_EQ(ToGrpcStatus(absl::InternalError("x")).error_details(), "");
}

TEST(GrpcStatusTest, RetryDelayIsWhatWasAsked) {
  const absl::Status status =
      WithRetryDelay(absl::ResourceExhaustedError("full"), absl::Milliseconds(1500));
  EXPECT_EQ(RetryDelay(FromGrpcStatus(ToGrpcStatus(status))), absl::Milliseconds(1500));
  EXPECT_EQ(RetryDelay(absl::ResourceExhaustedError("never fits")), std::nullopt);
  // google.rpc.Status {code 8, "full", details {"type.googleapis.com/google.rpc.RetryInfo",
  // {retry_delay {seconds 1, nanos 500000000}}}}, as every gRPC client decodes it.
  const std::string url = "type.googleapis.com/google.rpc.RetryInfo";
  const std::string retry("\x0a\x08\x08\x01\x10\x80\xca\xb5\xee\x01", 10);
  const std::string any = "\x0a\x28" + url + "\x12\x0a" + retry;
  EXPECT_EQ(ToGrpcStatus(status).error_details(), std::string("\x08\x08\x12\x04") + "full" +
                                                      "\x1a" + static_cast<char>(any.size()) + any);
}

TEST(GrpcStatusTest, DetailsThatAreNoDetailsAreLeftOut) {
  const grpc::Status odd(grpc::StatusCode::INTERNAL, "x", "\xff\xff\xff");
  EXPECT_EQ(FromGrpcStatus(odd), absl::InternalError("x"));
}

}  // namespace
}  // namespace kvasir::proto
