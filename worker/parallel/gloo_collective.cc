#include "worker/parallel/gloo_collective.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/store.h"
#include "gloo/transport/tcp/device.h"

namespace kvasir::worker {
namespace {

// Floats of one message. Small enough that the kernel takes a whole message that the peer is not
// yet reading: then all ranks can send first and receive afterwards without blocking each other.
constexpr size_t kChunkFloats = 16 * 1024;

// Precedes the floats of every message.
struct MessageHeader {
  uint64_t operation = 0;
  int64_t size = 0;  // floats
};
constexpr size_t kMessageBytes = sizeof(MessageHeader) + kChunkFloats * sizeof(float);

// Carries a Status through Gloo's stack frames, which know only exceptions.
struct StatusException : std::exception {
  explicit StatusException(absl::Status s) : status(std::move(s)) {}
  absl::Status status;
};

// The key-value store that Gloo needs, on top of our rendezvous.
class RendezvousStore final : public gloo::rendezvous::Store {
 public:
  RendezvousStore(Rendezvous& rendezvous, absl::Duration timeout)
      : rendezvous_(rendezvous), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    rendezvous_.Put(Name(key), std::string(data.begin(), data.end()));
  }
  std::vector<char> get(const std::string& key) override {
    absl::StatusOr<std::string> value = rendezvous_.Wait(Name(key), timeout_);
    if (!value.ok()) throw StatusException(value.status());
    return {value->begin(), value->end()};
  }
  // Gloo passes the context's timeout, which bounds collectives; ranks may load for longer.
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

 private:
  static std::string Name(const std::string& key) { return absl::StrCat("gloo/", key); }

  Rendezvous& rendezvous_;
  const absl::Duration timeout_;
};

// Gloo's messages begin with a place in its source, "[.../pair.cc:598] ", which is of no use to
// users.
absl::string_view WithoutSourcePlace(absl::string_view message) {
  const size_t end = message.find("] ");
  const bool has_place = absl::StartsWith(message, "[") && end != absl::string_view::npos;
  return has_place ? message.substr(end + 2) : message;
}

std::string Describe(absl::string_view operation, int rank, absl::Duration elapsed,
                     const std::exception& e) {
  return absl::StrCat("collective ", operation, " of rank ", rank, " failed after ",
                      absl::FormatDuration(elapsed), ": ", WithoutSourcePlace(e.what()));
}

}  // namespace

// One connection to a peer, and the two messages in flight on it.
struct GlooCollective::Mesh {
  struct Message {
    MessageHeader header;
    float data[kChunkFloats];
  };
  static_assert(sizeof(Message) == kMessageBytes);
  struct Peer {
    std::unique_ptr<Message> out = std::make_unique<Message>();
    std::unique_ptr<Message> in = std::make_unique<Message>();
    // Destroyed before the messages they point to, and before the context.
    std::unique_ptr<gloo::transport::Buffer> send;
    std::unique_ptr<gloo::transport::Buffer> receive;
  };

  std::shared_ptr<gloo::rendezvous::Context> context;
  std::vector<Peer> peers;  // by rank; this rank's own stays empty
};

GlooCollective::GlooCollective(const GlooOptions& options)
    : options_(options),
      mesh_(std::make_unique<Mesh>()),
      sends_(static_cast<size_t>(options.size)),
      sizes_(static_cast<size_t>(options.size)),
      sum_(kChunkFloats) {}

GlooCollective::~GlooCollective() = default;

absl::StatusOr<std::unique_ptr<GlooCollective>> GlooCollective::Connect(const GlooOptions& options,
                                                                        Rendezvous& rendezvous) {
  auto collective = std::unique_ptr<GlooCollective>(new GlooCollective(options));
  const absl::Status status = collective->Guarded("connect", [&] {
    Mesh& mesh = *collective->mesh_;
    auto device = gloo::transport::tcp::CreateDevice(options.host.c_str());
    mesh.context = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
    mesh.context->setTimeout(absl::ToChronoMilliseconds(options.timeout));
    RendezvousStore store(rendezvous, options.rendezvous_timeout);
    mesh.context->connectFullMesh(store, device);
    mesh.peers.resize(static_cast<size_t>(options.size));
    for (int rank = 0; rank < options.size; ++rank) {
      if (rank == options.rank) continue;
      Mesh::Peer& peer = mesh.peers[static_cast<size_t>(rank)];
      gloo::transport::Pair& pair = *mesh.context->getPair(rank);
      pair.setSync(/*enable=*/true, /*busyPoll=*/false);
      peer.send = pair.createSendBuffer(0, peer.out.get(), kMessageBytes);
      peer.receive = pair.createRecvBuffer(0, peer.in.get(), kMessageBytes);
    }
  });
  if (!status.ok()) return status;
  return collective;
}

template <typename Body>
absl::Status GlooCollective::Guarded(absl::string_view operation, Body body) {
  if (!broken_.ok()) return broken_;
  const auto start = std::chrono::steady_clock::now();
  try {
    body();
  } catch (const StatusException& e) {
    broken_ = e.status;
  } catch (const std::exception& e) {
    // Gloo has no exception type of its own for timeouts.
    const absl::Duration elapsed = absl::FromChrono(std::chrono::steady_clock::now() - start);
    const std::string message = Describe(operation, options_.rank, elapsed, e);
    broken_ = elapsed < options_.timeout ? absl::UnavailableError(message)
                                         : absl::DeadlineExceededError(message);
  }
  return broken_;
}

void GlooCollective::Exchange() {
  ++operation_;
  for (size_t p = 0; p < mesh_->peers.size(); ++p) {
    Mesh::Peer& peer = mesh_->peers[p];
    if (peer.send == nullptr) continue;
    const absl::Span<const float> data = sends_[p];
    peer.out->header = {.operation = operation_, .size = static_cast<int64_t>(data.size())};
    std::copy(data.begin(), data.end(), peer.out->data);
    peer.send->send(0, sizeof(MessageHeader) + data.size() * sizeof(float));
    peer.send->waitSend();
  }
  for (size_t p = 0; p < mesh_->peers.size(); ++p) {
    Mesh::Peer& peer = mesh_->peers[p];
    if (peer.receive == nullptr) continue;
    peer.receive->waitRecv();
    const MessageHeader& header = peer.in->header;
    if (header.operation != operation_ || header.size != sizes_[p]) {
      throw StatusException(absl::InternalError(
          absl::StrCat("ranks do not carry out the same plan: rank ", p, " sent message ",
                       header.operation, " of ", header.size, " floats, rank ", options_.rank,
                       " expects message ", operation_, " of ", sizes_[p])));
    }
  }
}

const float* GlooCollective::received(size_t peer) const { return mesh_->peers[peer].in->data; }

absl::Status GlooCollective::AllReduceSum(absl::Span<float> data) {
  return Guarded("all-reduce", [&] {
    if (size() == 2 || data.size() <= kChunkFloats) {
      ReduceDirect(data);
    } else {
      ReduceScattered(data);
    }
  });
}

// Every rank gets all data and adds it: one message time, and for two ranks no more bytes than any
// other way.
void GlooCollective::ReduceDirect(absl::Span<float> data) {
  for (size_t begin = 0; begin < data.size(); begin += kChunkFloats) {
    const absl::Span<float> chunk = data.subspan(begin, kChunkFloats);
    std::fill(sends_.begin(), sends_.end(), chunk);
    std::fill(sizes_.begin(), sizes_.end(), static_cast<int64_t>(chunk.size()));
    Exchange();
    SumReceived(chunk);
  }
}

// Rank r adds the r-th part and sends the sum to all: 2 (n - 1) / n of the bytes per rank, where
// the direct way takes n - 1.
void GlooCollective::ReduceScattered(absl::Span<float> data) {
  const int64_t part = (static_cast<int64_t>(data.size()) + size() - 1) / size();
  const auto chunk_of = [&](size_t rank, int64_t begin) {
    const int64_t part_end = std::min<int64_t>((static_cast<int64_t>(rank) + 1) * part,
                                               static_cast<int64_t>(data.size()));
    const int64_t chunk_begin = std::min(static_cast<int64_t>(rank) * part + begin, part_end);
    const int64_t chunk_end = std::min(chunk_begin + int64_t{kChunkFloats}, part_end);
    return data.subspan(static_cast<size_t>(chunk_begin),
                        static_cast<size_t>(chunk_end - chunk_begin));
  };
  const size_t self = static_cast<size_t>(rank());
  for (int64_t begin = 0; begin < part; begin += int64_t{kChunkFloats}) {
    const absl::Span<float> own = chunk_of(self, begin);
    for (size_t p = 0; p < sends_.size(); ++p) {
      sends_[p] = chunk_of(p, begin);
      sizes_[p] = static_cast<int64_t>(own.size());
    }
    Exchange();
    SumReceived(own);
    for (size_t p = 0; p < sends_.size(); ++p) {
      sends_[p] = own;
      sizes_[p] = static_cast<int64_t>(chunk_of(p, begin).size());
    }
    Exchange();
    for (size_t p = 0; p < sends_.size(); ++p) {
      const absl::Span<float> theirs = chunk_of(p, begin);
      if (p != self) std::copy_n(received(p), theirs.size(), theirs.begin());
    }
  }
}

void GlooCollective::SumReceived(absl::Span<float> own) {
  const auto of_rank = [&](size_t p) {
    return p == static_cast<size_t>(rank()) ? own.data() : received(p);
  };
  std::copy_n(of_rank(0), own.size(), sum_.begin());
  for (size_t p = 1; p < sends_.size(); ++p) {
    const float* addend = of_rank(p);
    for (size_t i = 0; i < own.size(); ++i) sum_[i] += addend[i];
  }
  std::copy_n(sum_.begin(), own.size(), own.begin());
}

absl::Status GlooCollective::AllGather(absl::Span<const float> in, absl::Span<float> out) {
  if (out.size() != in.size() * static_cast<size_t>(size())) {
    return absl::InvalidArgumentError(absl::StrCat("all-gather of ", in.size(), " floats from ",
                                                   size(), " ranks into ", out.size()));
  }
  return Guarded("all-gather", [&] {
    std::copy(in.begin(), in.end(), out.begin() + static_cast<ptrdiff_t>(in.size()) * rank());
    for (size_t begin = 0; begin < in.size(); begin += kChunkFloats) {
      const absl::Span<const float> chunk = in.subspan(begin, kChunkFloats);
      std::fill(sends_.begin(), sends_.end(), chunk);
      std::fill(sizes_.begin(), sizes_.end(), static_cast<int64_t>(chunk.size()));
      Exchange();
      for (size_t p = 0; p < sends_.size(); ++p) {
        if (p == static_cast<size_t>(rank())) continue;
        std::copy_n(received(p), chunk.size(), out.data() + p * in.size() + begin);
      }
    }
  });
}

}  // namespace kvasir::worker
