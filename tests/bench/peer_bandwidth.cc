// Bandwidth of bodies between two processes over the links of kvstore/peers, in MB/s as
// ucx_perftest counts them (2^20 bytes): peer_bandwidth TRANSPORTS BYTES COUNT. The sender keeps
// kWindow bodies under way. peer_bandwidth.py runs it beside ucx_perftest.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/peers/peer_node.h"
#include "tests/kvstore/peers/peer_process.h"

namespace kvasir::kvstore {
namespace {

constexpr uint64_t kWindow = 8;  // as peer_server.h sends them

// Asks for one body more for each that has come.
class Receiver : public PeerHandler {
 public:
  Receiver(uint64_t bytes, uint64_t count) : left_(count), asked_({.bytes = bytes}) {
    for (std::vector<std::byte>& place : places_) place.resize(bytes);
  }
  void OnStart(PeerNode& node) override { node_ = &node; }
  void OnLink(PeerLink) override {}
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte>,
                                               size_t) override {
    return absl::MakeSpan(places_[next_++ % kWindow]);
  }
  void OnMessage(PeerLink link, absl::Span<const std::byte>, absl::Span<std::byte>) override {
    if (asked_for_ > 0) Ask(link);
    kernels::MutexLock lock(mu_);
    if (--left_ == 0) done_.NotifyAll();
  }
  void OnLost(PeerLink, const absl::Status& why) override {
    std::fprintf(stderr, "lost: %s\n", why.ToString().c_str());
    std::exit(1);
  }
  void OnTick() override {}

  void Begin(PeerLink link) {
    asked_for_ = left_;
    for (uint64_t i = 0; i < kWindow; ++i) Ask(link);
  }
  void Await() {
    kernels::MutexLock lock(mu_);
    while (left_ > 0) done_.Wait(mu_);
  }

 private:
  void Ask(PeerLink link) {
    --asked_for_;
    node_->Send(link, BytesOf(asked_), {}, nullptr);
  }

  kernels::Mutex mu_;
  kernels::CondVar done_;
  uint64_t left_;
  uint64_t asked_for_ = 0;
  uint64_t next_ = 0;
  const Asked asked_;
  std::vector<std::byte> places_[kWindow];
  PeerNode* node_ = nullptr;
};

int Main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: peer_bandwidth TRANSPORTS BYTES COUNT\n");
    return 2;
  }
  const uint64_t bytes = std::strtoull(argv[2], nullptr, 10);
  const uint64_t count = std::strtoull(argv[3], nullptr, 10);
  PeerProcess peer(argv[1]);
  Receiver receiver(bytes, count);
  auto node = PeerNode::Create({.transports = argv[1]}, receiver);
  if (!node.ok()) {
    std::fprintf(stderr, "%s\n", node.status().ToString().c_str());
    return 1;
  }
  const auto begin = std::chrono::steady_clock::now();
  (*node)->Post([&] { receiver.Begin((*node)->Open(peer.address()).value()); });
  receiver.Await();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%.0f\n", static_cast<double>(bytes * count) / seconds.count() / (1 << 20));
  return 0;
}

}  // namespace
}  // namespace kvasir::kvstore

int main(int argc, char** argv) { return kvasir::kvstore::Main(argc, argv); }
