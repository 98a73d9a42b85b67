// Exports to a collector of the test's own: batches, a slow and an absent one, refusals and the
// end.
#include "coordinator/tracing/span_exporter.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "gmock/gmock.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

#include "proto/otlp/trace_service.grpc.pb.h"

namespace kvasir::coordinator {
namespace {

using testing::HasSubstr;

class Collector final : public otlp::TraceService::Service {
 public:
  // `port` 0: a free one.
  explicit Collector(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(),
                             &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Export(grpc::ServerContext* context, const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse* response) override {
    ++calls;
    while (is_stuck && !context->IsCancelled()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (failures > 0) {
      --failures;
      return grpc::Status(code, "no");
    }
    response->mutable_partial_success()->set_rejected_spans(rejects);
    std::lock_guard lock(mu_);
    requests_.push_back(*request);
    return grpc::Status::OK;
  }

  std::string endpoint() const { return "http://127.0.0.1:" + std::to_string(port_); }
  std::vector<otlp::ExportTraceServiceRequest> requests() {
    std::lock_guard lock(mu_);
    return requests_;
  }

  std::atomic<bool> is_stuck = false;
  std::atomic<int> failures = 0;  // of the next calls
  grpc::StatusCode code = grpc::StatusCode::UNAVAILABLE;
  int64_t rejects = 0;
  std::atomic<int> calls = 0;

 private:
  int port_ = 0;
  std::mutex mu_;
  std::vector<otlp::ExportTraceServiceRequest> requests_;
  std::unique_ptr<grpc::Server> server_;
};

class SpanExporterTest : public testing::Test {
 protected:
  std::unique_ptr<SpanExporter> Start(const Collector& collector, size_t most_spans = 2048,
                                      size_t batch_spans = 512) {
    SpanExporterOptions options;
    options.endpoint = collector.endpoint();
    options.most_spans = most_spans;
    options.batch_spans = batch_spans;
    options.service_name = "tested";
    options.delay = absl::Milliseconds(20);
    options.retry = absl::Milliseconds(10);
    absl::StatusOr<std::unique_ptr<SpanExporter>> exporter = SpanExporter::Start(options, metrics_);
    EXPECT_TRUE(exporter.ok()) << exporter.status();
    return *std::move(exporter);
  }
  static std::vector<otlp::Span> Spans(size_t count) {
    std::vector<otlp::Span> spans(count);
    for (otlp::Span& span : spans) span.set_name("s");
    return spans;
  }
  std::string Metric(const std::string& series) {
    const std::string text = prometheus::TextSerializer().Serialize(metrics_.registry().Collect());
    const size_t begin = text.find(series);
    return begin == text.npos ? "none" : text.substr(begin, text.find('\n', begin) - begin);
  }
  // Waits until the metric has the value.
  void Expect(const std::string& metric, int value) {
    const std::string expected = metric + " " + std::to_string(value);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Metric(metric) != expected && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_EQ(Metric(metric), expected);
  }
  void ExpectExported(int spans) {
    Expect("kvasir_trace_spans_exported_total{model_name=\"m\"}", spans);
  }
  void ExpectDropped(const std::string& reason, int spans) {
    Expect("kvasir_trace_spans_dropped_total{model_name=\"m\",reason=\"" + reason + "\"}", spans);
  }

  Metrics metrics_{"m", {"default"}};
};

TEST_F(SpanExporterTest, BatchesHoldAtMostSoManySpansAndTheDescriptionOfTheProcess) {
  Collector collector;
  const auto exporter = Start(collector, 2048, 4);
  for (int i = 0; i < 5; ++i) exporter->Add(Spans(2));
  ExpectExported(10);
  int64_t spans = 0;
  for (const otlp::ExportTraceServiceRequest& request : collector.requests()) {
    const otlp::ResourceSpans& resource = request.resource_spans(0);
    EXPECT_EQ(resource.resource().attributes(0).key(), "service.name");
    EXPECT_EQ(resource.resource().attributes(0).value().string_value(), "tested");
    EXPECT_LE(resource.scope_spans(0).spans_size(), 4);
    spans += resource.scope_spans(0).spans_size();
  }
  EXPECT_EQ(spans, 10);
}

// Adding takes no time though the collector takes nothing; whole requests are dropped.
TEST_F(SpanExporterTest, WhatIsAddedBeyondTheBoundIsDroppedAndCounted) {
  Collector collector;
  collector.is_stuck = true;
  const auto exporter = Start(collector, 8, 4);
  exporter->Add(Spans(4));
  while (collector.calls == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) exporter->Add(Spans(3));  // two of them fit
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(500));
  ExpectDropped("queue_full", 98 * 3);
  collector.is_stuck = false;
  ExpectExported(4 + 2 * 3);
}

TEST_F(SpanExporterTest, ABatchIsSentAgainAfterAFaultThatMayPass) {
  Collector collector;
  collector.failures = 3;
  const auto exporter = Start(collector);
  exporter->Add(Spans(2));
  ExpectExported(2);
  EXPECT_EQ(collector.calls, 4);
  ExpectDropped("export_failed", 0);
}

TEST_F(SpanExporterTest, ABatchThatFailsForGoodIsDroppedAndTheNextOneIsSent) {
  Collector collector;
  collector.failures = 1;
  collector.code = grpc::StatusCode::UNIMPLEMENTED;
  const auto exporter = Start(collector);
  exporter->Add(Spans(2));
  ExpectDropped("export_failed", 2);
  EXPECT_EQ(collector.calls, 1);
  exporter->Add(Spans(3));
  ExpectExported(3);
}

TEST_F(SpanExporterTest, RejectedSpansAreCounted) {
  Collector collector;
  collector.rejects = 2;
  const auto exporter = Start(collector);
  exporter->Add(Spans(5));
  ExpectExported(3);
  ExpectDropped("rejected", 2);
}

TEST_F(SpanExporterTest, WhatWaitsAtTheEndIsSent) {
  Collector collector;
  const auto exporter = Start(collector);
  exporter->Add(Spans(2));
  exporter->Stop(absl::Seconds(10));
  ExpectExported(2);
  exporter->Add(Spans(1));
  ExpectDropped("queue_full", 1);
}

TEST_F(SpanExporterTest, ACollectorThatTakesNothingDoesNotHoldTheEndUp) {
  Collector collector;
  collector.is_stuck = true;
  const auto exporter = Start(collector);
  exporter->Add(Spans(2));
  while (collector.calls == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto begin = std::chrono::steady_clock::now();
  exporter->Stop(absl::Milliseconds(50));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  ExpectDropped("export_failed", 2);
}

TEST(CollectorAddress, IsHostAndPort) {
  const auto target = [](const char* endpoint) { return ParseCollectorAddress(endpoint)->target; };
  EXPECT_EQ(target("http://127.0.0.1:5000"), "127.0.0.1:5000");
  EXPECT_EQ(target("http://collector.example.org/"), "collector.example.org:4317");
  EXPECT_EQ(target("https://[::1]"), "[::1]:4317");
  EXPECT_EQ(target("https://[::1]:5"), "[::1]:5");
  EXPECT_TRUE(ParseCollectorAddress("https://c")->is_tls);
  EXPECT_FALSE(ParseCollectorAddress("http://c")->is_tls);
  for (const char* wrong :
       {"", "collector:4317", "http://", "http://c:4318/v1/traces", "grpc://c", "http://u@c"}) {
    EXPECT_THAT(ParseCollectorAddress(wrong).status().message(), HasSubstr("OTLP over gRPC"))
        << wrong;
  }
}

}  // namespace
}  // namespace kvasir::coordinator
