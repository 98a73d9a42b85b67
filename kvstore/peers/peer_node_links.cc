// Links of a node, and the messages on them.
#include <chrono>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/peers/peer_node_impl.h"

namespace kvasir::kvstore {
namespace {

constexpr unsigned kMessageId = 1;  // of UCX's active messages
// How long the end of a node waits for links that are set up. What is left then stays UCX's.
constexpr std::chrono::seconds kSetUpPatience(1);
// How long a link that ends waits for bodies on their way before it is given up.
constexpr std::chrono::seconds kBodyPatience(2);
constexpr int kMostRounds = 1000;  // of UCX's progress, for what ends without the other process

}  // namespace

// UCX may call back for requests in flight, which it forgets.
PeerNodeImpl::Link::~Link() {
  if (endpoint != nullptr && !is_shared) CloseEndpoint();
  if (worker != nullptr) {
    // A body whose copy failed, because the other process is gone, has ended for us. Its further
    // parts may still be queued, and UCX 1.13 ends the process when they are at its worker's end.
    for (int i = 0; i < kMostRounds && ucp_worker_progress(worker) != 0; ++i) continue;
    ucp_worker_destroy(worker);
  }
  for (Request* request : in_flight) delete request;
}

// At once, whatever the other process does. UCX has no such end for shared memory.
void PeerNodeImpl::Link::CloseEndpoint() {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t close = ucp_ep_close_nbx(endpoint, &param);
  for (int i = 0; i < kMostRounds; ++i) {
    const bool moved = ucp_worker_progress(worker) != 0;
    const bool open = UCS_PTR_IS_PTR(close) && ucp_request_check_status(close) == UCS_INPROGRESS;
    if (!moved && !open) break;
  }
  if (UCS_PTR_IS_PTR(close)) ucp_request_free(close);
}

absl::StatusOr<PeerNodeImpl::Link*> PeerNodeImpl::AddLink(ucp_ep_params_t params, bool is_local) {
  // Shared memory is not chosen where transports must report failures. Within a machine the
  // connection by which a link is opened tells of a process that has ended.
  const bool is_shared = is_local && has_shared_memory_;
  auto link = std::make_unique<Link>(*this, PeerLink(++next_link_), is_shared);
  KVASIR_ASSIGN_OR_RETURN(link->worker, MakeWorker(link->wake_fd));
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = kMessageId;
  handler.cb = OnAm;
  handler.arg = link.get();
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  ucs_status_t status = ucp_worker_set_am_recv_handler(link->worker, &handler);
  if (status != UCS_OK) return UcxError("setting a handler", status);
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.err_mode = is_shared ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = OnError;
  params.err_handler.arg = link.get();
  status = ucp_ep_create(link->worker, &params, &link->endpoint);
  if (status != UCS_OK) return UcxError("opening a link", status);
  Link* const added = link.get();
  links_[added->id] = std::move(link);
  AwaitOpen(*added);
  return added;
}

absl::StatusOr<PeerLink> PeerNodeImpl::Open(const std::string& text) {
  KVASIR_ASSIGN_OR_RETURN(const SocketAddress address, ParseAddress(text));
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = address.get();
  params.sockaddr.addrlen = address.size;
  KVASIR_ASSIGN_OR_RETURN(const Link* link, AddLink(params, DeviceOf(address).ok()));
  return link->id;
}

void PeerNodeImpl::OnConnection(ucp_conn_request_h connection, void* node) {
  static_cast<PeerNodeImpl*>(node)->connections_.push_back(connection);
}

void PeerNodeImpl::Accept() {
  for (const ucp_conn_request_h connection : std::exchange(connections_, {})) {
    ucp_conn_request_attr_t attributes = {};
    attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
    const bool is_known = ucp_conn_request_query(connection, &attributes) == UCS_OK;
    const SocketAddress from = {.storage = attributes.client_address,
                                .size = sizeof(attributes.client_address)};
    ucp_ep_params_t params = {};
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = connection;
    const absl::StatusOr<Link*> link = AddLink(params, is_known && DeviceOf(from).ok());
    if (link.ok()) {
      handler_.OnLink((*link)->id);
    } else {
      spdlog::warn("a peer's link is refused: {}", link.status().ToString());
    }
  }
}

void PeerNodeImpl::OnError(void* link, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  Link& lost = *static_cast<Link*>(link);
  lost.node.Close(lost.id, UcxError("link", status));
}

void PeerNodeImpl::Close(PeerLink id, const absl::Status& why) {
  const auto it = links_.find(id);
  if (it == links_.end() || !it->second->ended.ok()) return;
  it->second->ended = why.ok() ? absl::CancelledError("the link was closed") : why;
  it->second->give_up_at = Clock::now() + kBodyPatience;
  ending_.push_back(id);
}

void PeerNodeImpl::EndLinks() {
  for (const PeerLink id : std::exchange(ending_, {})) {
    const Link& ending = *links_.at(id);
    if (!MayBeDestroyed(ending) && Clock::now() < ending.give_up_at) {
      ending_.push_back(id);
      continue;
    }
    // Out of the table first: UCX calls back while a link is destroyed.
    std::unique_ptr<Link> link = std::move(links_.extract(id).mapped());
    const absl::Status why = link->ended;
    Destroy(std::move(link));
    handler_.OnLost(id, why);
  }
}

// The handler hears nothing of these ends.
void PeerNodeImpl::EndAll() {
  auto links = std::exchange(links_, {});  // UCX calls back while links are destroyed
  const Clock::time_point give_up_at = Clock::now() + kBodyPatience;
  for (const auto& [id, link] : links) {
    if (link->ended.ok()) link->ended = absl::CancelledError("the node ends");
    while (!MayBeDestroyed(*link) && Clock::now() < give_up_at) ucp_worker_progress(link->worker);
  }
  for (auto& [id, link] : links) Destroy(std::move(link));
  const Clock::time_point deadline = Clock::now() + kSetUpPatience;
  while (!opening_.empty() && Clock::now() < deadline) DestroyOpened();
  is_context_in_use_ |= !opening_.empty();
  for (std::unique_ptr<Link>& link : opening_) std::ignore = link.release();
}

void PeerNodeImpl::Destroy(std::unique_ptr<Link> link) {
  if (!MayBeDestroyed(*link)) {
    spdlog::warn("a link is given up in the middle of {} bodies; its memory is kept",
                 link->receiving);
    is_context_in_use_ = true;
    std::ignore = link.release();
  } else if (link->is_shared && link->is_opening) {
    opening_.push_back(std::move(link));
  }
}

// Returns false when there was nothing to do.
bool PeerNodeImpl::DestroyOpened() {
  bool moved = false;
  for (const std::unique_ptr<Link>& link : opening_) {
    moved |= ucp_worker_progress(link->worker) != 0;
  }
  std::erase_if(opening_, [](const auto& link) { return !link->is_opening; });
  return moved;
}

// --- messages -----------------------------------------------------------------------------------

void PeerNodeImpl::Send(PeerLink id, absl::Span<const std::byte> header,
                        absl::Span<const std::byte> body, std::function<void()> on_sent) {
  KVASIR_CHECK(header.size() <= kMostHeaderBytes && body.size() <= kMostBodyBytes);
  const auto it = links_.find(id);
  if (it == links_.end() || !it->second->ended.ok()) return;
  Link& link = *it->second;
  auto request = std::make_unique<Request>(Request{.link = link,
                                                   .header = {header.begin(), header.end()},
                                                   .sent_body = body,
                                                   .on_sent = std::move(on_sent)});
  if (link.is_open) {
    Begin(std::move(request));
  } else {
    link.waiting.push_back(std::move(request));
  }
}

void PeerNodeImpl::Begin(std::unique_ptr<Request> request) {
  Link& link = request->link;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = OnSent;
  param.user_data = request.get();
  const ucs_status_ptr_t ucx =
      ucp_am_send_nbx(link.endpoint, kMessageId, request->header.data(), request->header.size(),
                      request->sent_body.data(), request->sent_body.size(), &param);
  if (UCS_PTR_IS_PTR(ucx)) {
    link.in_flight.insert(request.release());
  } else {
    link.sent_at_once.emplace_back(std::move(request), UCS_PTR_RAW_STATUS(ucx));
  }
}

// A flush ends when the link has been set up.
void PeerNodeImpl::AwaitOpen(Link& link) {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = OnOpened;
  param.user_data = &link;
  const ucs_status_ptr_t ucx = ucp_ep_flush_nbx(link.endpoint, &param);
  link.is_opening = UCS_PTR_IS_PTR(ucx);
  if (!link.is_opening) OnOpened(nullptr, UCS_PTR_RAW_STATUS(ucx), &link);
}

void PeerNodeImpl::OnOpened(void* ucx, ucs_status_t status, void* opened) {
  if (ucx != nullptr) ucp_request_free(ucx);
  Link& link = *static_cast<Link*>(opened);
  link.is_opening = false;
  if (!link.ended.ok()) return;
  if (status != UCS_OK) {
    link.node.Close(link.id, UcxError("opening a link", status));
    return;
  }
  link.is_open = true;
  for (std::unique_ptr<Request>& request : std::exchange(link.waiting, {})) {
    link.node.Begin(std::move(request));
  }
}

void PeerNodeImpl::FinishSent(Link& link) {
  for (auto& [request, status] : std::exchange(link.sent_at_once, {})) {
    Finish(*request, status);
  }
}

ucs_status_t PeerNodeImpl::OnAm(void* link, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param) {
  Link& from = *static_cast<Link*>(link);
  return from.node.OnActiveMessage(from, {static_cast<const std::byte*>(header), header_bytes},
                                   data, bytes, *param);
}

ucs_status_t PeerNodeImpl::OnActiveMessage(Link& link, absl::Span<const std::byte> header,
                                           void* data, size_t bytes,
                                           const ucp_am_recv_param_t& param) {
  if (!link.ended.ok()) return UCS_OK;
  std::optional<absl::Span<std::byte>> place;
  if (header.size() <= kMostHeaderBytes && bytes <= kMostBodyBytes) {
    place = handler_.PlaceOf(link.id, header, bytes);
  }
  if (!place.has_value()) {
    Close(link.id, absl::InvalidArgumentError(absl::StrCat("a message of ", header.size(), " + ",
                                                           bytes, " bytes is refused")));
    return UCS_OK;
  }
  KVASIR_CHECK(place->size() == bytes);
  auto request = std::make_unique<Request>(Request{
      .link = link, .header = {header.begin(), header.end()}, .body = *place, .received = true});
  if ((param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
    if (bytes > 0) std::memcpy(place->data(), data, bytes);
    Finish(*request, UCS_OK);
    return UCS_OK;
  }
  ucp_request_param_t receive = {};
  receive.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  receive.cb.recv_am = OnReceived;
  receive.user_data = request.get();
  ++link.receiving;
  Request* const begun = request.release();  // in_flight has it
  link.in_flight.insert(begun);
  const ucs_status_ptr_t ucx =
      ucp_am_recv_data_nbx(link.worker, data, place->data(), bytes, &receive);
  if (!UCS_PTR_IS_PTR(ucx)) OnCompletion(nullptr, UCS_PTR_RAW_STATUS(ucx), begun);
  return UCS_INPROGRESS;
}

void PeerNodeImpl::OnSent(void* ucx, ucs_status_t status, void* request) {
  OnCompletion(ucx, status, request);
}

void PeerNodeImpl::OnReceived(void* ucx, ucs_status_t status, size_t /*bytes*/, void* request) {
  OnCompletion(ucx, status, request);
}

void PeerNodeImpl::OnCompletion(void* ucx, ucs_status_t status, void* request) {
  if (ucx != nullptr) ucp_request_free(ucx);
  const std::unique_ptr<const Request> owned(static_cast<Request*>(request));
  Link& link = owned->link;
  link.in_flight.erase(static_cast<Request*>(request));
  if (owned->received) --link.receiving;
  link.node.Finish(*owned, status);
}

void PeerNodeImpl::Finish(const Request& request, ucs_status_t status) {
  Link& link = request.link;
  if (!link.ended.ok()) return;
  if (status != UCS_OK) {
    Close(link.id, UcxError(request.received ? "receiving" : "sending", status));
  } else if (request.received) {
    handler_.OnMessage(link.id, request.header, request.body);
  } else if (request.on_sent) {
    request.on_sent();
  }
}

}  // namespace kvasir::kvstore
