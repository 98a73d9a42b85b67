// The implementation of peer_node.h, for its own files only: peer_node.cc (start, end, the thread)
// and peer_node_links.cc (links and messages).
//
// Each link has a worker of UCX of its own. A link ends with its worker, whatever state the other
// process is in, and after that UCX knows none of its memory any more. Closing one endpoint of a
// worker for certain takes an error mode that no transport over shared memory has. There bodies are
// read out of the other process, in calls that end soon though it has stopped or is gone, or, where
// that is forbidden, sent on by it piece by piece; the worker must not end before them. A peer that
// has stopped never sends on: after a while its link is given up, and its worker is never touched
// again and never ends, so that nothing is written to memory that has another use by then.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "kvstore/peers/peer_node.h"
#include "kvstore/peers/socket_address.h"
#include "ucp/api/ucp.h"

namespace kvasir::kvstore {

absl::Status UcxError(absl::string_view what, ucs_status_t status);

class PeerNodeImpl final : public PeerNode {
 public:
  PeerNodeImpl(const PeerNodeOptions& options, PeerHandler& handler)
      : tick_(options.tick_ms), handler_(handler) {}
  ~PeerNodeImpl() override;

  absl::Status Init(const PeerNodeOptions& options);

  const std::string& address() const override { return address_; }
  void Post(std::function<void()> work) override EXCLUDES(mu_);
  absl::StatusOr<PeerLink> Open(const std::string& address) override;
  void Send(PeerLink link, absl::Span<const std::byte> header, absl::Span<const std::byte> body,
            std::function<void()> on_sent) override;
  void Close(PeerLink link, const absl::Status& why) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Link;
  // A body that is sent or received.
  struct Request {
    Link& link;
    std::vector<std::byte> header = {};
    absl::Span<std::byte> body = {};             // of one that is received
    absl::Span<const std::byte> sent_body = {};  // of one that is sent
    std::function<void()> on_sent = {};
    bool received = false;
  };
  struct Link {
    Link(PeerNodeImpl& n, PeerLink i, bool shared) : node(n), id(i), is_shared(shared) {}
    ~Link();
    void CloseEndpoint();

    PeerNodeImpl& node;
    const PeerLink id;
    const bool is_shared;  // bodies go through shared memory
    ucp_worker_h worker = nullptr;
    ucp_ep_h endpoint = nullptr;
    int wake_fd = -1;
    // UCX knows how the link goes. What is sent before waits here: UCX 1.13 chooses how to send it
    // by the limits of TCP, and fails when it is shared memory after all.
    bool is_open = false;
    // UCX sets it up, and has a request of ours meanwhile. Over shared memory UCX 1.13 ends the
    // process when a link is destroyed with that.
    bool is_opening = false;
    std::vector<std::unique_ptr<Request>> waiting;
    absl::Status ended;                       // why, once it ends
    Clock::time_point give_up_at;             // once it ends
    absl::flat_hash_set<Request*> in_flight;  // owned
    int64_t receiving = 0;                    // of them
    // Those of UCX that ended while they were begun.
    std::vector<std::pair<std::unique_ptr<Request>, ucs_status_t>> sent_at_once;
  };

  absl::Status InitContext(const PeerNodeOptions& options, const SocketAddress& address);
  absl::StatusOr<ucp_worker_h> MakeWorker(int& wake_fd) const;
  absl::Status Listen(const SocketAddress& address);
  absl::StatusOr<Link*> AddLink(ucp_ep_params_t params, bool is_local);

  void Run() EXCLUDES(mu_);
  void RunPosted() EXCLUDES(mu_);
  bool Progress();
  void Accept();
  void AwaitOpen(Link& link);
  void Begin(std::unique_ptr<Request> request);
  void FinishSent(Link& link);
  void Tick();
  void Sleep();
  void EndLinks();
  void EndAll();
  // Whether nothing reads into memory of the link any more, once it has ended.
  static bool MayBeDestroyed(const Link& link) { return !link.is_shared || link.receiving == 0; }
  // Destroys a link, at once or when UCX has set it up. No message was ever on one that waits. One
  // that something is still received on is given up: it stays as it is, for ever.
  void Destroy(std::unique_ptr<Link> link);
  bool DestroyOpened();

  ucs_status_t OnActiveMessage(Link& link, absl::Span<const std::byte> header, void* data,
                               size_t bytes, const ucp_am_recv_param_t& param);
  static void OnCompletion(void* ucx, ucs_status_t status, void* request);
  void Finish(const Request& request, ucs_status_t status);

  // UCX's callbacks.
  static void OnConnection(ucp_conn_request_h connection, void* node);
  static void OnError(void* link, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t OnAm(void* link, const void* header, size_t header_bytes, void* data,
                           size_t bytes, const ucp_am_recv_param_t* param);
  static void OnOpened(void* ucx, ucs_status_t status, void* link);
  static void OnSent(void* ucx, ucs_status_t status, void* request);
  static void OnReceived(void* ucx, ucs_status_t status, size_t bytes, void* request);

  const std::chrono::milliseconds tick_;
  PeerHandler& handler_;
  std::string address_;
  bool has_shared_memory_ = false;  // among the transports
  ucp_context_h context_ = nullptr;
  ucp_worker_h listening_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int wake_fd_ = -1;

  // The node's thread.
  int64_t next_link_ = 0;
  absl::flat_hash_map<PeerLink, std::unique_ptr<Link>> links_;
  std::vector<PeerLink> ending_;                // to be ended outside of UCX's callbacks
  std::vector<std::unique_ptr<Link>> opening_;  // lost, and to be destroyed once they are set up
  bool is_context_in_use_ = false;              // for ever: a link was given up, or never set up
  std::vector<ucp_conn_request_h> connections_;
  Clock::time_point next_tick_ = {};

  kernels::Mutex mu_;
  std::vector<std::function<void()>> posted_ GUARDED_BY(mu_);
  bool stop_ GUARDED_BY(mu_) = false;

  std::thread thread_;  // last: it uses all above
};

}  // namespace kvasir::kvstore
