#include "kvstore/peers/peer_node.h"

#include <algorithm>
#include <poll.h>
#include <pthread.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"
#include "kvstore/peers/peer_node_impl.h"
#include "kvstore/peers/ucx_log.h"

namespace kvasir::kvstore {
namespace {

using kernels::MutexLock;

// Bodies from this size on are described first and fetched into their place; shorter ones come with
// their description and are copied there.
constexpr const char* kFetchedFrom = "16k";
// UCX looks after a silent link this often, where its transport can.
constexpr const char* kKeepAlive = "1s";

}  // namespace

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::UnavailableError(absl::StrCat("UCX: ", what, ": ", ucs_status_string(status)));
}

absl::StatusOr<std::unique_ptr<PeerNode>> PeerNode::Create(const PeerNodeOptions& options,
                                                           PeerHandler& handler) {
  auto node = std::make_unique<PeerNodeImpl>(options, handler);
  KVASIR_RETURN_IF_ERROR(node->Init(options));
  return node;
}

absl::Status PeerNodeImpl::Init(const PeerNodeOptions& options) {
  RouteUcxLogs();
  KVASIR_ASSIGN_OR_RETURN(const SocketAddress address, Resolve(options.host, options.port));
  KVASIR_RETURN_IF_ERROR(InitContext(options, address));
  KVASIR_ASSIGN_OR_RETURN(listening_, MakeWorker(wake_fd_));
  KVASIR_RETURN_IF_ERROR(Listen(address));
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "peers");
    Run();
  });
  return absl::OkStatus();
}

absl::Status PeerNodeImpl::InitContext(const PeerNodeOptions& options,
                                       const SocketAddress& address) {
  KVASIR_ASSIGN_OR_RETURN(const std::string device, DeviceOf(address));
  const std::vector<std::string> transports = absl::StrSplit(options.transports, ',');
  has_shared_memory_ =
      std::any_of(transports.begin(), transports.end(), [](const std::string& transport) {
        return transport == "sm" || transport == "posix" || transport == "sysv";
      });
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return UcxError("reading its configuration", status);
  }
  const std::pair<const char*, std::string> settings[] = {{"TLS", options.transports},
                                                          {"NET_DEVICES", device},
                                                          {"RNDV_THRESH", kFetchedFrom},
                                                          {"KEEPALIVE_INTERVAL", kKeepAlive},
                                                          // A process that was killed comes back.
                                                          {"CM_REUSEADDR", "y"}};
  ucs_status_t status = UCS_OK;
  for (const auto& [name, value] : settings) {
    if (status == UCS_OK) status = ucp_config_modify(config, name, value.c_str());
  }
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "kvasir";
  if (status == UCS_OK) status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status == UCS_OK) return absl::OkStatus();
  return UcxError(absl::StrCat("transports '", options.transports, "' on device ", device), status);
}

absl::StatusOr<ucp_worker_h> PeerNodeImpl::MakeWorker(int& wake_fd) const {
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  ucs_status_t status = ucp_worker_create(context_, &params, &worker);
  if (status != UCS_OK) return UcxError("creating a worker", status);
  status = ucp_worker_get_efd(worker, &wake_fd);
  if (status == UCS_OK) return worker;
  ucp_worker_destroy(worker);
  return UcxError("getting a worker's descriptor", status);
}

absl::Status PeerNodeImpl::Listen(const SocketAddress& address) {
  ucp_listener_params_t params = {};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = address.get();
  params.sockaddr.addrlen = address.size;
  params.conn_handler.cb = OnConnection;
  params.conn_handler.arg = this;
  ucs_status_t status = ucp_listener_create(listening_, &params, &listener_);
  if (status != UCS_OK) return UcxError(absl::StrCat("listening on ", address.ToString()), status);
  ucp_listener_attr_t attributes = {};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) return UcxError("asking for the port", status);
  address_ = SocketAddress{.storage = attributes.sockaddr, .size = address.size}.ToString();
  return absl::OkStatus();
}

PeerNodeImpl::~PeerNodeImpl() {
  if (thread_.joinable()) {
    {
      MutexLock lock(mu_);
      stop_ = true;
    }
    ucp_worker_signal(listening_);
    thread_.join();
  }
  for (const ucp_conn_request_h connection : connections_) {
    ucp_listener_reject(listener_, connection);
  }
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
  if (listening_ != nullptr) ucp_worker_destroy(listening_);
  if (context_ != nullptr && !is_context_in_use_) ucp_cleanup(context_);
}

// --- the thread ---------------------------------------------------------------------------------

void PeerNodeImpl::Post(std::function<void()> work) {
  {
    MutexLock lock(mu_);
    posted_.push_back(std::move(work));
  }
  ucp_worker_signal(listening_);
}

void PeerNodeImpl::Run() {
  handler_.OnStart(*this);
  for (;;) {
    RunPosted();
    EndLinks();
    const bool moved = Progress();
    Accept();
    Tick();
    {
      MutexLock lock(mu_);
      if (stop_) break;
      if (!posted_.empty()) continue;
    }
    if (!moved && ending_.empty()) Sleep();
  }
  RunPosted();
  EndAll();
}

void PeerNodeImpl::RunPosted() {
  std::vector<std::function<void()>> posted;
  {
    MutexLock lock(mu_);
    posted.swap(posted_);
  }
  for (const std::function<void()>& work : posted) work();
}

// Returns false when there was nothing to do.
bool PeerNodeImpl::Progress() {
  constexpr int kMostRounds = 64;  // others want to be heard, too
  bool moved = ucp_worker_progress(listening_) != 0;
  moved |= DestroyOpened();
  std::vector<PeerLink> ids;  // a callback may add links
  for (const auto& [id, link] : links_) ids.push_back(id);
  for (const PeerLink id : ids) {
    Link& link = *links_.at(id);
    for (int i = 0; i < kMostRounds && (link.ended.ok() || !MayBeDestroyed(link)); ++i) {
      const bool had_ended = !link.sent_at_once.empty();
      FinishSent(link);
      if (ucp_worker_progress(link.worker) == 0 && !had_ended) break;
      moved = true;
    }
  }
  return moved;
}

void PeerNodeImpl::Tick() {
  const Clock::time_point now = Clock::now();
  if (now < next_tick_) return;
  next_tick_ = now + tick_;
  handler_.OnTick();
}

void PeerNodeImpl::Sleep() {
  std::vector<pollfd> wakes = {{.fd = wake_fd_, .events = POLLIN, .revents = 0}};
  // Not armed: something has happened meanwhile.
  if (ucp_worker_arm(listening_) != UCS_OK) return;
  for (const auto& [id, link] : links_) {
    if (!link->sent_at_once.empty() || ucp_worker_arm(link->worker) != UCS_OK) return;
    wakes.push_back({.fd = link->wake_fd, .events = POLLIN, .revents = 0});
  }
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(next_tick_ - Clock::now());
  poll(wakes.data(), wakes.size(), static_cast<int>(std::max<int64_t>(left.count(), 0)) + 1);
}

}  // namespace kvasir::kvstore
