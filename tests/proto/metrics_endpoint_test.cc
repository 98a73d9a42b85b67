#include "proto/metrics_endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "prometheus/counter.h"

#include "httplib.h"

namespace kvasir::proto {
namespace {

TEST(MetricsEndpoint, ServesTheRegistryAndHealth) {
  prometheus::Registry registry;
  prometheus::BuildCounter()
      .Name("kvasir_things_total")
      .Help("Things.")
      .Register(registry)
      .Add({})
      .Increment(3);
  absl::Status health = absl::UnavailableError("loading weights");
  auto endpoint = MetricsEndpoint::Start({.registry = &registry, .health = [&] { return health; }});
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  httplib::Client client("127.0.0.1", (*endpoint)->port());

  const auto metrics = client.Get("/metrics");
  ASSERT_TRUE(metrics);
  EXPECT_THAT(metrics->body, ::testing::HasSubstr("kvasir_things_total 3"));
  const auto not_ready = client.Get("/health");
  ASSERT_TRUE(not_ready);
  EXPECT_EQ(not_ready->status, 503);
  EXPECT_EQ(not_ready->body, "loading weights\n");
  health = absl::OkStatus();
  EXPECT_EQ(client.Get("/health")->status, 200);
}

TEST(MetricsEndpoint, AnswersHeadAsGet) {
  prometheus::Registry registry;
  auto endpoint =
      MetricsEndpoint::Start({.registry = &registry, .health = [] { return absl::OkStatus(); }});
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  for (const char* path : {"/metrics", "/health", "/nothing"}) {
    httplib::Client client("127.0.0.1", (*endpoint)->port());
    const auto get = client.Get(path), head = client.Head(path);
    ASSERT_TRUE(get && head) << path;
    EXPECT_EQ(head->status, get->status);
    EXPECT_EQ(head->headers, get->headers);
  }
  httplib::Client client("127.0.0.1", (*endpoint)->port());
  EXPECT_EQ(client.Post("/metrics")->status, 405);
}

TEST(MetricsEndpoint, PortInUseIsAnError) {
  prometheus::Registry registry;
  const auto ok = [] { return absl::OkStatus(); };
  auto first = MetricsEndpoint::Start({.registry = &registry, .health = ok});
  ASSERT_TRUE(first.ok());
  const auto second =
      MetricsEndpoint::Start({.port = (*first)->port(), .registry = &registry, .health = ok});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvasir::proto
