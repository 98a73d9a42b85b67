#include "coordinator/tracing/span_exporter.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/otlp/trace_service.grpc.pb.h"
#include "proto/process/named_thread.h"
#include "proto/process/rare_warnings.h"
#include "proto/process/version.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr int kMostTries = 5;
constexpr size_t kMostMessageBytes = 256;  // of the collector in the log
constexpr char kPort[] = "4317";

otlp::KeyValue Attribute(const std::string& key, const std::string& value) {
  otlp::KeyValue attribute;
  attribute.set_key(key);
  attribute.mutable_value()->set_string_value(value);
  return attribute;
}

otlp::Resource ThisProcess(const std::string& service_name) {
  otlp::Resource resource;
  *resource.add_attributes() = Attribute("service.name", service_name);
  *resource.add_attributes() = Attribute("service.version", std::string(proto::Version()));
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) == 0) {
    *resource.add_attributes() = Attribute("host.name", host);
  }
  otlp::KeyValue& process = *resource.add_attributes();
  process.set_key("process.pid");
  process.mutable_value()->set_int_value(getpid());
  return resource;
}

// The codes after which OTLP lets a client try again. Those that only a full collector sends, or a
// fault in between, are among them.
bool MayTryAgain(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DATA_LOSS:
      return true;
    default:
      return false;
  }
}

std::chrono::steady_clock::time_point In(absl::Duration duration) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(duration);
}

class OtlpExporter final : public SpanExporter {
 public:
  OtlpExporter(const SpanExporterOptions& options, CollectorAddress address, Metrics& metrics)
      : options_(options),
        address_(std::move(address)),
        metrics_(metrics),
        warnings_(absl::StrCat("traces to ", options.endpoint)) {
    otlp::ResourceSpans& spans = *frame_.add_resource_spans();
    *spans.mutable_resource() = ThisProcess(options.service_name);
    otlp::InstrumentationScope& scope = *spans.add_scope_spans()->mutable_scope();
    scope.set_name("kvasir");
    scope.set_version(std::string(proto::Version()));
    thread_ = proto::NamedThread("traces", [this] { Run(); });
  }
  ~OtlpExporter() override { Stop(absl::ZeroDuration()); }

  void Add(std::vector<otlp::Span> spans) override EXCLUDES(mu_);
  void Stop(absl::Duration grace) override EXCLUDES(mu_);

 private:
  void Run() EXCLUDES(mu_);
  // Waits for a batch that is full or old enough. Empty: the thread ends.
  std::vector<otlp::Span> AwaitBatch() EXCLUDES(mu_);
  void Send(std::vector<otlp::Span> batch) EXCLUDES(mu_);
  grpc::Status Call(const otlp::ExportTraceServiceRequest& request,
                    otlp::ExportTraceServiceResponse& response) EXCLUDES(mu_);
  // False when the thread is to end.
  bool PauseBeforeRetry(absl::Duration pause) EXCLUDES(mu_);

  const SpanExporterOptions options_;
  const CollectorAddress address_;
  Metrics& metrics_;

  // The thread's.
  proto::RareWarnings warnings_;
  otlp::ExportTraceServiceRequest frame_;           // a request without spans
  std::unique_ptr<otlp::TraceService::Stub> stub_;  // null: no channel, or one that failed

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::deque<otlp::Span> waiting_ GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point oldest_ GUARDED_BY(mu_) = {};  // when it was added
  grpc::ClientContext* call_ GUARDED_BY(mu_) = nullptr;                // the call that runs
  bool stopping_ GUARDED_BY(mu_) = false;  // what waits is sent at once, with one try
  bool cancelled_ GUARDED_BY(mu_) = false;
  bool ended_ GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses all above
};

void OtlpExporter::Add(std::vector<otlp::Span> spans) {
  MutexLock lock(mu_);
  if (stopping_ || waiting_.size() + spans.size() > options_.most_spans) {
    metrics_.SpansDropped(Metrics::SpanDrop::kQueueFull, std::ssize(spans));
    return;
  }
  if (waiting_.empty()) oldest_ = std::chrono::steady_clock::now();
  std::move(spans.begin(), spans.end(), std::back_inserter(waiting_));
  changed_.NotifyAll();
}

void OtlpExporter::Stop(absl::Duration grace) {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
    const auto until = In(grace);
    while (!ended_ && std::chrono::steady_clock::now() < until) changed_.WaitUntil(mu_, until);
    cancelled_ = true;
    if (call_ != nullptr) call_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

void OtlpExporter::Run() {
  for (std::vector<otlp::Span> batch = AwaitBatch(); !batch.empty(); batch = AwaitBatch()) {
    Send(std::move(batch));
  }
  MutexLock lock(mu_);
  ended_ = true;
  changed_.NotifyAll();
}

std::vector<otlp::Span> OtlpExporter::AwaitBatch() {
  MutexLock lock(mu_);
  while (!stopping_ && waiting_.size() < options_.batch_spans) {
    if (waiting_.empty()) {
      changed_.Wait(mu_);
      continue;
    }
    const auto due = oldest_ + absl::ToChronoNanoseconds(options_.delay);
    if (std::chrono::steady_clock::now() >= due) break;
    changed_.WaitUntil(mu_, due);
  }
  const auto size = static_cast<int64_t>(std::min(waiting_.size(), options_.batch_spans));
  std::vector<otlp::Span> batch(std::make_move_iterator(waiting_.begin()),
                                std::make_move_iterator(waiting_.begin() + size));
  waiting_.erase(waiting_.begin(), waiting_.begin() + size);
  return batch;
}

void OtlpExporter::Send(std::vector<otlp::Span> batch) {
  const int64_t count = std::ssize(batch);
  otlp::ExportTraceServiceRequest request = frame_;
  otlp::ScopeSpans& spans = *request.mutable_resource_spans(0)->mutable_scope_spans(0);
  for (otlp::Span& span : batch) *spans.add_spans() = std::move(span);
  absl::Duration pause = options_.retry;
  for (int tries = 1;; ++tries, pause *= 2) {
    otlp::ExportTraceServiceResponse response;
    const grpc::Status sent = Call(request, response);
    if (sent.ok()) {
      const int64_t rejected =
          std::clamp<int64_t>(response.partial_success().rejected_spans(), 0, count);
      metrics_.SpansExported(count - rejected);
      if (rejected == 0) return;
      metrics_.SpansDropped(Metrics::SpanDrop::kRejected, rejected);
      return warnings_.Warn(
          absl::StrCat("the collector rejected spans: ",
                       response.partial_success().error_message().substr(0, kMostMessageBytes)));
    }
    stub_.reset();
    if (MayTryAgain(sent.error_code()) && tries < kMostTries && PauseBeforeRetry(pause)) continue;
    metrics_.SpansDropped(Metrics::SpanDrop::kExportFailed, count);
    return warnings_.Warn(absl::StrCat(
        count, " spans are dropped: ", sent.error_message().substr(0, kMostMessageBytes), " (code ",
        sent.error_code(), "); expected a collector that takes OTLP over gRPC"));
  }
}

grpc::Status OtlpExporter::Call(const otlp::ExportTraceServiceRequest& request,
                                otlp::ExportTraceServiceResponse& response) {
  if (stub_ == nullptr) {
    stub_ = otlp::TraceService::NewStub(grpc::CreateChannel(
        address_.target, address_.is_tls ? options_.tls->CredentialsFor(address_.target)
                                         : grpc::InsecureChannelCredentials()));
  }
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() +
                       absl::ToChronoMilliseconds(options_.timeout));
  {
    MutexLock lock(mu_);
    if (cancelled_) return grpc::Status(grpc::StatusCode::CANCELLED, "the server ends");
    call_ = &context;
  }
  const grpc::Status sent = stub_->Export(&context, request, &response);
  MutexLock lock(mu_);
  call_ = nullptr;
  return sent;
}

bool OtlpExporter::PauseBeforeRetry(absl::Duration pause) {
  MutexLock lock(mu_);
  const auto until = In(pause);
  while (!stopping_ && std::chrono::steady_clock::now() < until) changed_.WaitUntil(mu_, until);
  return !stopping_;
}

}  // namespace

absl::StatusOr<CollectorAddress> ParseCollectorAddress(const std::string& endpoint) {
  absl::string_view rest = endpoint;
  CollectorAddress address;
  address.is_tls = absl::ConsumePrefix(&rest, "https://");
  const bool has_scheme = address.is_tls || absl::ConsumePrefix(&rest, "http://");
  rest = absl::StripSuffix(rest, "/");
  if (!has_scheme || rest.empty() || rest.find_first_of("/@?# ") != rest.npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--otlp-endpoint ", endpoint,
                     ": expected http://HOST:PORT or https://HOST:PORT of a collector that takes "
                     "OTLP over gRPC, without a path; the port is ",
                     kPort, " if it is left out"));
  }
  // The colons of an IPv6 address lie between brackets.
  const size_t colon = rest.rfind(':');
  const bool has_port = colon != rest.npos && rest.find(']', colon) == rest.npos;
  address.target = has_port ? std::string(rest) : absl::StrCat(rest, ":", kPort);
  return address;
}

absl::StatusOr<std::unique_ptr<SpanExporter>> SpanExporter::Start(
    const SpanExporterOptions& options, Metrics& metrics) {
  KVASIR_ASSIGN_OR_RETURN(CollectorAddress address, ParseCollectorAddress(options.endpoint));
  return std::make_unique<OtlpExporter>(options, std::move(address), metrics);
}

void SetAttribute(const std::string& key, const std::string& value, otlp::Span& span) {
  *span.add_attributes() = Attribute(key, value);
}

void SetAttribute(const std::string& key, int64_t value, otlp::Span& span) {
  otlp::KeyValue& attribute = *span.add_attributes();
  attribute.set_key(key);
  attribute.mutable_value()->set_int_value(value);
}

void SetAttribute(const std::string& key, double value, otlp::Span& span) {
  otlp::KeyValue& attribute = *span.add_attributes();
  attribute.set_key(key);
  attribute.mutable_value()->set_double_value(value);
}

}  // namespace kvasir::coordinator
