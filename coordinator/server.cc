#include "coordinator/server.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server_builder.h"
#include "spdlog/spdlog.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/contexts/contexts_service.h"
#include "coordinator/engine_api.h"
#include "coordinator/engine_loop.h"
#include "coordinator/events/kv_event_publisher.h"
#include "coordinator/group/grpc_worker_client.h"
#include "coordinator/group/peer_list.h"
#include "coordinator/http/http_front.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_folder.h"
#include "coordinator/policy/limits.h"
#include "coordinator/policy/policy.h"
#include "coordinator/replicas/mover.h"
#include "coordinator/replicas/prefill_servers.h"
#include "coordinator/request/request_trace.h"
#include "coordinator/request/unknown_calls.h"
#include "coordinator/request/unread_calls.h"
#include "coordinator/security/api_keys.h"
#include "coordinator/server_parts.h"
#include "coordinator/service.h"
#include "coordinator/text_pool.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer_fit.h"
#include "coordinator/tracing/span_exporter.h"
#include "coordinator/vllm/vllm_service.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/block.h"
#include "proto/grpc_listener.h"
#include "proto/metrics_endpoint.h"
#include "proto/security/group_secret.h"
#include "proto/security/tls.h"
#include "proto/worker_protocol.h"

namespace kvasir::coordinator {
namespace {

constexpr const char* kServiceNames[] = {"kvasir.v1.Generation", "kvasir.v1.Contexts",
                                         "vllm.grpc.engine.VllmEngine"};
// Clients may ping every 10 s. A client that does not answer our pings within 30 s is gone.
constexpr int kMinClientPingMs = 10'000;
constexpr int kPingIntervalMs = 20'000;
constexpr int kPingTimeoutMs = 10'000;
// Streams of one connection besides the requests that may run and wait: for calls that are answered
// at once, among them refusals.
constexpr int kOtherStreams = 64;
// Time for answers that are being written when the server stops.
constexpr std::chrono::seconds kLastWrites(2);

// Blocks of a host tier besides those that sequences fill: for blocks being written to disk.
constexpr int64_t kSpareBlocks = 64;

absl::Duration RankTimeout(const v1::ServeConfig& config) {
  return absl::Seconds(config.rank_timeout());
}

// Returns ping settings by which a silent rank is pinged and given up within `timeout`.
WorkerPings PingsWithin(absl::Duration timeout) {
  const int64_t interval =
      std::max<int64_t>(absl::ToInt64Milliseconds(timeout) / 4, proto::kWorkerMinPingIntervalMs);
  return {.interval_ms = static_cast<int>(interval),
          .timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(timeout) - interval)};
}

absl::Status CheckKvHoldsContext(const GroupInfo& group) {
  const int64_t most = group.host_blocks * kvstore::kBlockTokens;
  if (group.max_model_len <= most) return absl::OkStatus();
  double bytes = 0;  // largest size of a block on any rank
  for (const v1::Ready& rank : group.ranks) {
    bytes = std::max(bytes, static_cast<double>(rank.block_bytes()));
  }
  const int64_t blocks = (group.max_model_len - 1) / kvstore::kBlockTokens + 1;
  return absl::FailedPreconditionError(absl::StrFormat(
      "the context has %d tokens, of which KV holds %d; lower --max-model-len to %d, or give each "
      "worker %.3f GB by --kv-host-size-gb",
      group.max_model_len, most, most, 1e-9 * bytes * static_cast<double>(blocks + kSpareBlocks)));
}

class ServerImpl final : public Server {
 public:
  ServerImpl(const v1::ServeConfig& config, std::unique_ptr<const Tokenizer> tokenizer,
             ModelFolder folder, PolicyTable policies)
      : config_(config),
        tokenizer_(std::move(tokenizer)),
        folder_(std::move(folder)),
        policies_(std::move(policies)),
        metrics_(config.served_model_name(), NamesOf(policies_)) {}
  ~ServerImpl() override { Shutdown(); }

  absl::Status Init(const WorkerGroupFactory& make_group);

  int port() const override { return listener_->port(); }
  int http_port() const override { return http_->port(); }
  int metrics_port() const override { return endpoint_->port(); }
  std::vector<std::string> worker_metrics_addresses() const override;
  absl::Status WaitUntilReady(absl::Duration timeout) override {
    return engine_->WaitUntilReady(After(clock_.Now(), timeout));
  }
  void Drain() override EXCLUDES(mu_);
  bool WaitUntilIdle(absl::Duration timeout) override {
    return engine_->WaitUntilIdle(After(clock_.Now(), timeout));
  }
  void EndGroup() override { engine_->Stop(absl::UnavailableError("the server is shutting down")); }
  int64_t num_moved() const override { return mover_ == nullptr ? 0 : mover_->num_answers(); }
  bool WaitUntilMovedEnd(absl::Duration timeout) override {
    return mover_ == nullptr || mover_->WaitUntilNone(After(clock_.Now(), timeout));
  }
  void Shutdown() override EXCLUDES(mu_);

 private:
  absl::Status LoadKeys();  // and certificates
  absl::Status StartTracing();
  absl::Status ListenForGrpc();
  absl::Status KnowOtherServers();
  absl::Status BuildServer();
  absl::Status Health() const;
  // FAILED_PRECONDITION, with the flags that would help, when the group cannot hold the context or
  // no policy can serve it.
  absl::Status CheckGroup(const GroupInfo& group) const;
  void OnReadiness(bool ready) EXCLUDES(mu_);
  void OnAccepting(bool accepts) EXCLUDES(mu_);
  // Sets the health of the services' names. That of "", the process itself, stays SERVING.
  void PublishReadiness() REQUIRES(mu_);

  // In order of use: a member uses those above it.
  const v1::ServeConfig config_;
  SteadyClock clock_;
  const std::unique_ptr<const Tokenizer> tokenizer_;
  const ModelFolder folder_;
  const PolicyTable policies_;
  Metrics metrics_;
  std::shared_ptr<proto::ServerTls> tls_;  // null: ports are plain
  std::unique_ptr<SpanExporter> spans_;    // null, as the next one: requests are not traced
  std::unique_ptr<const RequestTracer> tracer_;
  std::unique_ptr<Contexts> contexts_;
  std::unique_ptr<WorkerGroup> group_;
  std::unique_ptr<KvEventPublisher> kv_events_;
  std::unique_ptr<EngineLoop> engine_;
  std::unique_ptr<proto::MetricsEndpoint> endpoint_;
  std::unique_ptr<proto::GrpcListener> listener_;
  std::unique_ptr<ApiKeys> keys_;            // null: whoever reaches the server may ask
  std::unique_ptr<Mover> mover_;             // null: running requests do not move
  std::unique_ptr<PrefillServers> prefill_;  // null: all prompts are read here
  std::unique_ptr<EngineApi> api_;
  std::unique_ptr<HttpFront> http_;
  TextPool texts_;  // its work uses all above
  std::unique_ptr<GenerationService> service_;
  std::unique_ptr<ContextsService> contexts_service_;
  std::unique_ptr<VllmService> vllm_service_;
  std::unique_ptr<UnknownCalls> unknown_calls_;
  std::unique_ptr<grpc::Server> server_;

  kernels::Mutex mu_;
  bool ready_ GUARDED_BY(mu_) = false;   // the group is formed
  bool accepts_ GUARDED_BY(mu_) = true;  // new connections
  bool draining_ GUARDED_BY(mu_) = false;
  bool stopped_ GUARDED_BY(mu_) = false;
};

std::vector<std::string> ServerImpl::worker_metrics_addresses() const {
  const absl::StatusOr<GroupInfo> group = engine_->ServedGroup();
  std::vector<std::string> addresses;
  if (!group.ok()) return addresses;
  for (const v1::Ready& rank : group->ranks) addresses.push_back(rank.metrics_address());
  return addresses;
}

absl::Status ServerImpl::Init(const WorkerGroupFactory& make_group) {
  KVASIR_RETURN_IF_ERROR(LoadKeys());
  KVASIR_RETURN_IF_ERROR(StartTracing());
  KVASIR_RETURN_IF_ERROR(KnowOtherServers());
  KVASIR_ASSIGN_OR_RETURN(contexts_, OpenContexts(config_, clock_, metrics_));
  group_ = make_group(MakeShardPlan(config_, policies_), clock_);
  EngineLoopOptions options;
  options.scheduler = config_.scheduler();
  options.startup_timeout = absl::Seconds(config_.startup_timeout());
  options.check_group = [this](const GroupInfo& group) { return CheckGroup(group); };
  options.on_readiness = [this](bool ready) { OnReadiness(ready); };
  if (!config_.kv_events().kv_events_endpoint().empty()) {
    KVASIR_ASSIGN_OR_RETURN(kv_events_, KvEventPublisher::Start(KvEventOptionsOf(config_)));
    options.block_listener = kv_events_.get();
  }
  engine_ = std::make_unique<EngineLoop>(std::move(options), *group_, clock_, metrics_);
  KVASIR_RETURN_IF_ERROR(ListenForGrpc());
  api_ = std::make_unique<EngineApi>(EngineApiContext{.config = config_,
                                                      .folder = folder_,
                                                      .tokenizer = *tokenizer_,
                                                      .policies = policies_,
                                                      .engine = *engine_,
                                                      .clock = clock_,
                                                      .metrics = metrics_,
                                                      .texts = texts_,
                                                      .contexts = *contexts_,
                                                      .keys = keys_.get(),
                                                      .tracer = tracer_.get(),
                                                      .mover = mover_.get(),
                                                      .prefill = prefill_.get(),
                                                      .started = clock_.Now()});
  service_ = std::make_unique<GenerationService>(*api_, *listener_,
                                                 absl::Seconds(config_.client_timeout()));
  contexts_service_ = std::make_unique<ContextsService>(*contexts_, *api_, *listener_,
                                                        absl::Seconds(config_.client_timeout()));
  vllm_service_ =
      std::make_unique<VllmService>(*api_, *listener_, absl::Seconds(config_.client_timeout()));
  unknown_calls_ = std::make_unique<UnknownCalls>(*api_);
  KVASIR_ASSIGN_OR_RETURN(
      http_, HttpFront::Start({.api = *api_,
                               .contexts = *contexts_,
                               .host = config_.endpoint().host(),
                               .port = static_cast<int>(config_.endpoint().http_port()),
                               .registry = metrics_.registry(),
                               .health = [this] { return Health(); },
                               .client_timeout = absl::Seconds(config_.client_timeout()),
                               .model = config_.served_model_name(),
                               .tokenizer_config = folder_.tokenizer_config,
                               .chat_template = folder_.chat.source(),
                               .tls = tls_}));
  KVASIR_ASSIGN_OR_RETURN(
      endpoint_,
      proto::MetricsEndpoint::Start({.host = config_.endpoint().host(),
                                     .port = static_cast<int>(config_.endpoint().metrics_port()),
                                     .registry = &metrics_.registry(),
                                     .health = [this] { return Health(); },
                                     .tls = tls_}));
  KVASIR_RETURN_IF_ERROR(BuildServer());
  listener_->Start();
  contexts_->Start(*api_);
  engine_->Start();
  return absl::OkStatus();
}

absl::Status ServerImpl::LoadKeys() {
  if (!config_.api_keys_file().empty()) {
    KVASIR_ASSIGN_OR_RETURN(keys_, ApiKeys::Load(config_.api_keys_file()));
  }
  KVASIR_ASSIGN_OR_RETURN(tls_, proto::ServerTls::Load(config_.tls()));
  if (tls_ != nullptr) tls_->ExportTo(metrics_.registry());
  return absl::OkStatus();
}

absl::Status ServerImpl::StartTracing() {
  const v1::OtlpConfig& otlp = config_.otlp();
  if (otlp.otlp_endpoint().empty()) return absl::OkStatus();
  SpanExporterOptions options;
  options.endpoint = otlp.otlp_endpoint();
  options.service_name = otlp.otlp_service_name();
  KVASIR_ASSIGN_OR_RETURN(options.tls, proto::ChannelTls::Load(TlsToOthers(config_)));
  KVASIR_ASSIGN_OR_RETURN(const CollectorAddress address, ParseCollectorAddress(options.endpoint));
  if (address.is_tls && config_.tls_ca_file().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--otlp-endpoint ", options.endpoint,
                     " speaks TLS and there is no --tls-ca-file by which it is known; "
                     "/etc/ssl/certs/ca-certificates.crt trusts the public CAs"));
  }
  KVASIR_ASSIGN_OR_RETURN(spans_, SpanExporter::Start(options, metrics_));
  tracer_ = std::make_unique<const RequestTracer>(config_.served_model_name(), *spans_);
  return absl::OkStatus();
}

absl::Status ServerImpl::KnowOtherServers() {
  KVASIR_ASSIGN_OR_RETURN(mover_, Mover::Create(config_, TlsToOthers(config_), clock_, metrics_));
  KVASIR_ASSIGN_OR_RETURN(prefill_, PrefillServers::Create(config_, TlsToOthers(config_)));
  return absl::OkStatus();
}

absl::Status ServerImpl::ListenForGrpc() {
  const std::string address =
      absl::StrCat(config_.endpoint().host(), ":", config_.endpoint().port());
  absl::StatusOr<std::unique_ptr<proto::GrpcListener>> listener = proto::GrpcListener::Listen(
      {.address = address,
       .tls = tls_,
       .registry = &metrics_.registry(),
       .on_status = [this](const absl::Status& status) { OnAccepting(status.ok()); }});
  if (!listener.ok()) {
    return absl::UnavailableError(
        absl::StrCat(listener.status().message(), "; --port 0 takes any free one"));
  }
  listener_ = *std::move(listener);
  return absl::OkStatus();
}

absl::Status ServerImpl::Health() const {
  KVASIR_RETURN_IF_ERROR(engine_->ServedGroup().status());
  return listener_->status();
}

absl::Status ServerImpl::CheckGroup(const GroupInfo& group) const {
  KVASIR_RETURN_IF_ERROR(CheckKvHoldsContext(group));
  return policies_.CheckContext(group.max_model_len, group.trained_window);
}

absl::Status ServerImpl::BuildServer() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinClientPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Streams beyond what the server can hold wait at the client; kOtherStreams are for other calls.
  builder.AddChannelArgument(
      GRPC_ARG_MAX_CONCURRENT_STREAMS,
      static_cast<int>(config_.scheduler().max_num_seqs() + config_.scheduler().max_queue_len()) +
          kOtherStreams);
  listener_->AddTo(builder);
  builder.RegisterService(service_.get());
  builder.RegisterService(contexts_service_.get());
  builder.RegisterService(vllm_service_.get());
  builder.RegisterCallbackGenericService(unknown_calls_.get());
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> watches;
  watches.push_back(std::make_unique<UnreadCalls>(*api_));
  builder.experimental().SetInterceptorCreators(std::move(watches));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC cannot start its server");
  OnReadiness(false);
  return absl::OkStatus();
}

void ServerImpl::OnReadiness(bool ready) {
  if (ready) contexts_->OnReady();
  kernels::MutexLock lock(mu_);
  ready_ = ready;
  PublishReadiness();
}

void ServerImpl::OnAccepting(bool accepts) {
  kernels::MutexLock lock(mu_);
  accepts_ = accepts;
  PublishReadiness();
}

void ServerImpl::PublishReadiness() {
  if (server_ == nullptr) return;
  for (const char* name : kServiceNames) {
    server_->GetHealthCheckService()->SetServingStatus(name, ready_ && accepts_ && !draining_);
  }
}

void ServerImpl::Drain() {
  if (contexts_ != nullptr) contexts_->Stop();
  {
    kernels::MutexLock lock(mu_);
    if (std::exchange(draining_, true)) return;
    PublishReadiness();
  }
  if (engine_ != nullptr) engine_->Drain();
  if (mover_ != nullptr) mover_->MoveAll();
}

void ServerImpl::Shutdown() {
  Drain();
  {
    kernels::MutexLock lock(mu_);
    if (std::exchange(stopped_, true)) return;
  }
  const absl::Status why = absl::UnavailableError("the server is shutting down");
  if (engine_ != nullptr) engine_->Stop(why);
  if (prefill_ != nullptr) prefill_->Stop();
  if (mover_ != nullptr) mover_->Stop(why);
  if (listener_ != nullptr) listener_->Stop();
  if (http_ != nullptr) http_->Stop(absl::FromChrono(kLastWrites));
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + kLastWrites);
  if (spans_ != nullptr) spans_->Stop(absl::FromChrono(kLastWrites));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const v1::ServeConfig& config,
                                                      std::vector<std::string> addresses) {
  if (addresses.empty()) {
    return absl::InvalidArgumentError("no worker addresses are given; a server needs at least one");
  }
  const absl::Duration timeout = RankTimeout(config);
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const proto::GroupSecret> secret,
                          proto::GroupSecret::Read(config.group_secret_file()));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<proto::ChannelTls> tls,
                          proto::ChannelTls::Load(TlsToOthers(config)));
  KVASIR_ASSIGN_OR_RETURN(std::vector<std::vector<std::string>> peers,
                          ParsePeers(config.peers(), static_cast<int64_t>(addresses.size())));
  return Start(config, [&](const v1::ShardPlan& plan, Clock& clock) {
    return CreateWorkerGroup({.addresses = std::move(addresses),
                              .shard_plan = plan,
                              .peers = std::move(peers),
                              .answer_timeout = absl::Seconds(config.startup_timeout()),
                              .reply_spread = timeout},
                             GrpcWorkerDialer(secret, tls, PingsWithin(timeout)), clock);
  });
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const v1::ServeConfig& config,
                                                      const WorkerGroupFactory& make_group) {
  v1::ServeConfig resolved = config;
  resolved.mutable_scheduler()->set_max_num_batched_tokens(TokensOfStep(config));
  resolved.set_served_model_name(ModelName(config));
  KVASIR_ASSIGN_OR_RETURN(PolicyTable policies, MakePolicies(config));
  KVASIR_ASSIGN_OR_RETURN(ModelFolder folder, LoadModelFolder(config.model().model()));
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<const Tokenizer> tokenizer,
                          Tokenizer::Load(config.model().model()));
  KVASIR_RETURN_IF_ERROR(CheckTokenizerFits(*tokenizer, folder));
  auto server = std::make_unique<ServerImpl>(resolved, std::move(tokenizer), std::move(folder),
                                             std::move(policies));
  KVASIR_RETURN_IF_ERROR(server->Init(make_group));
  return server;
}

}  // namespace kvasir::coordinator
