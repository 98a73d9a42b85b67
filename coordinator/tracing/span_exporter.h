// Sends finished spans to a collector of OpenTelemetry, by OTLP over gRPC. A thread of its own
// sends them in batches; who adds spans never waits for it. When the collector is slow or away
// spans wait within a bound, further ones are dropped, and metrics count them. It hides the
// channel, batches, tries and the description of this process. Made by the server. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/metrics/metrics.h"
#include "proto/otlp/trace_service.pb.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

// The messages of spans under a short name.
namespace otlp = opentelemetry::proto::collector::trace::v1;

struct SpanExporterOptions {
  std::string endpoint;  // http://HOST[:PORT], or https:// for TLS; the port is 4317 by default
  std::string service_name = {};               // service.name of the spans' resource
  std::shared_ptr<proto::ChannelTls> tls;      // used for https://
  size_t most_spans = 2048;                    // that wait; further ones are dropped
  size_t batch_spans = 512;                    // that one call sends at most
  absl::Duration delay = absl::Seconds(1);     // before a batch that is not full is sent
  absl::Duration timeout = absl::Seconds(10);  // of a call, with the time to connect
  absl::Duration retry = absl::Seconds(1);     // before a second try; doubles with each further one
};

class SpanExporter {
 public:
  // INVALID_ARGUMENT for an endpoint of another form.
  static absl::StatusOr<std::unique_ptr<SpanExporter>> Start(const SpanExporterOptions& options,
                                                             Metrics& metrics);
  virtual ~SpanExporter() = default;  // stops at once

  // Takes all spans of a request, or drops them all when too many wait.
  virtual void Add(std::vector<otlp::Span> spans) = 0;
  // Sends what waits, for at most `grace`, and ends the thread. Later spans are dropped.
  virtual void Stop(absl::Duration grace) = 0;
};

// The collector's address of a gRPC channel, and whether it speaks TLS. INVALID_ARGUMENT as Start.
struct CollectorAddress {
  std::string target;  // "HOST:PORT"
  bool is_tls = false;
};
absl::StatusOr<CollectorAddress> ParseCollectorAddress(const std::string& endpoint);

// Adds an attribute.
void SetAttribute(const std::string& key, const std::string& value, otlp::Span& span);
void SetAttribute(const std::string& key, int64_t value, otlp::Span& span);
void SetAttribute(const std::string& key, double value, otlp::Span& span);

}  // namespace kvasir::coordinator
