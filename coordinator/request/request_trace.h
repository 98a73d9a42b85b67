// The spans of a request, made at its end: one of the whole request, under the span that the client
// named in its `traceparent`, and below it one for each part of its time: queue (its end: restore),
// prefill, decode. Names and attributes are those of OpenTelemetry's conventions for generative AI,
// and vLLM's for latencies; others begin with "kvasir.". Prompts and answers are never part of
// them. Made by the server, called by requests and the API. Thread-safe.
//
// A client decides by the flag `sampled` of its traceparent whether its request is traced. Requests
// without a traceparent are.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/request/accepted_request.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/tracing/span_exporter.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class RequestTracer {
 public:
  // `exporter` outlives the tracer.
  RequestTracer(std::string model, SpanExporter& exporter)
      : model_(std::move(model)), exporter_(exporter) {}

  // `total`: from its arrival to its end, which is now. `summary` as in LogRequestEnd.
  void OnEnd(const AcceptedRequest& request, const absl::Status& status, const v1::Finish& summary,
             absl::Duration total) const;
  void OnRefusal(const RequestOrigin& origin, const absl::Status& why, absl::Duration total) const;

 private:
  const std::string model_;
  SpanExporter& exporter_;
};

}  // namespace kvasir::coordinator
