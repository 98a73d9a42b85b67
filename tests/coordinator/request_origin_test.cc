#include "coordinator/request/request_origin.h"

#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

constexpr char kTrace[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(Traceparent, NamesTraceAndCaller) {
  const std::optional<TraceContext> trace = ParseTraceparent(kTrace);
  ASSERT_TRUE(trace.has_value());
  EXPECT_EQ(trace->trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(trace->parent_id, "b7ad6b7169203331");
  EXPECT_TRUE(trace->is_sampled);
  EXPECT_FALSE(
      ParseTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")->is_sampled);
  EXPECT_TRUE(ParseTraceparent("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"));
}

TEST(Traceparent, WhatIsMalformedIsNone) {
  const std::string whole = kTrace;
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(ParseTraceparent(whole.substr(0, length))) << length;
  }
  for (const char* header : {
           "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           "00-00000000000000000000000000000000-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
           "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
           "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01more",
           "00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
       }) {
    EXPECT_FALSE(ParseTraceparent(header)) << header;
  }
}

TEST(RequestOrigin, TheRequestsOwnIdCountsThenTheHeadersThenANewOne) {
  const auto new_id = [] { return std::string("new"); };
  v1::GenerateRequest request;
  EXPECT_EQ(OriginOf(request, {}, new_id, {}).request_id, "new");
  EXPECT_EQ(OriginOf(request, {.request_id = "header"}, new_id, {}).request_id, "header");
  request.set_request_id("own");
  EXPECT_EQ(OriginOf(request, {.request_id = "header"}, new_id, {}).request_id, "own");
}

TEST(RequestOrigin, WhatIsTooLongIsNotKept) {
  v1::GenerateRequest request;
  request.set_request_id(std::string(129, 'i'));
  request.set_tenant_id(std::string(129, 't'));
  const std::string header(129, 'h');
  const RequestOrigin origin =
      OriginOf(request, {.request_id = header}, [] { return std::string("new"); }, {});
  EXPECT_EQ(origin.request_id, "new");
  EXPECT_EQ(origin.tenant, "");
}

TEST(HeaderText, IsPrintableAsciiForAnyId) {
  EXPECT_EQ(HeaderText("a b%20~"), "a b%20~");
  EXPECT_EQ(HeaderText("a\n%\xc3\xbc"), "a%0A%25%C3%BC");
}

}  // namespace
}  // namespace kvasir::coordinator
