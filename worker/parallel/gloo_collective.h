// The collective of workers, over Gloo's TCP transport. It hides Gloo: its store, its threads and
// its exceptions, which all become absl::Status here. The arithmetic is ours: Gloo only moves bytes
// between pairs of ranks, so every sum is taken in rank order by construction (Gloo's own ring adds
// in an order that depends on the segment). Made when a group forms; used only by the engine's
// thread.
//
// Latency: the calling thread itself reads from a peer (Gloo's synchronous mode), not its event
// loop, which saves two thread switches per message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "worker/parallel/collective.h"
#include "worker/parallel/rendezvous.h"

namespace kvasir::worker {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  // Address at which the other ranks reach this one.
  std::string host = "127.0.0.1";
  // Bound of every wait for a peer: one that is silent for longer is taken for dead.
  absl::Duration timeout = absl::Seconds(30);
  // How long the other ranks may take to publish their address: they may still read weights.
  absl::Duration rendezvous_timeout = absl::Minutes(30);
};

class GlooCollective final : public Collective {
 public:
  // Blocks until all ranks are connected. UNAVAILABLE or DEADLINE_EXCEEDED when that fails, or the
  // status of Rendezvous::Fail.
  static absl::StatusOr<std::unique_ptr<GlooCollective>> Connect(const GlooOptions& options,
                                                                 Rendezvous& rendezvous);
  ~GlooCollective() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  absl::Duration timeout() const override { return options_.timeout; }
  absl::Status AllReduceSum(absl::Span<float> data) override;
  absl::Status AllGather(absl::Span<const float> in, absl::Span<float> out) override;

 private:
  struct Mesh;  // Gloo's objects

  explicit GlooCollective(const GlooOptions& options);

  // Runs `body`. Anything it throws breaks the collective and becomes a status.
  template <typename Body>
  absl::Status Guarded(absl::string_view operation, Body body);
  // Sends one message to each peer, sends_[peer], and receives one from each, of sizes_[peer]
  // floats; each has at most kChunkFloats. Received data lies in received(peer) until the next
  // Exchange. Throws.
  void Exchange();
  const float* received(size_t peer) const;

  void ReduceDirect(absl::Span<float> data);
  void ReduceScattered(absl::Span<float> data);
  // own = sum over ranks, in rank order, of the received data and `own` itself.
  void SumReceived(absl::Span<float> own);

  const GlooOptions options_;
  std::unique_ptr<Mesh> mesh_;
  uint64_t operation_ = 0;  // counts messages, to detect ranks that are out of step
  absl::Status broken_;

  // The current exchange, by rank; this rank's own entry is ignored.
  std::vector<absl::Span<const float>> sends_;
  std::vector<int64_t> sizes_;
  std::vector<float> sum_;  // scratch of SumReceived
};

}  // namespace kvasir::worker
