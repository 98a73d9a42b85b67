// Another process with a node that answers: a real peer, which tests can kill and stop. The process
// is forked, so make it before this process has a node or threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

#include "kvstore/peers/peer_node.h"

namespace kvasir::kvstore {

// A request: `count` messages with bodies of `bytes`, the i-th with the contents of seed + i. Count
// 0: one body, always the same memory.
struct Asked {
  uint64_t seed = 0;
  uint64_t bytes = 0;
  uint64_t count = 0;
};

// The header of an answer, and of bodies that are sent to the process, which sends them back.
struct Answered {
  uint64_t seed = 0;
};

inline std::vector<std::byte> ContentsOf(uint64_t seed, size_t bytes) {
  std::vector<std::byte> contents(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::byte& b : contents) {
    state = state * 6364136223846793005 + 1442695040888963407;
    b = static_cast<std::byte>(state >> 56);
  }
  return contents;
}

template <typename T>
absl::Span<const std::byte> BytesOf(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(value)};
}

// Gives what is asked for, and sends bodies back.
class AnsweringHandler : public PeerHandler {
 public:
  void OnStart(PeerNode& node) override { node_ = &node; }
  void OnLink(PeerLink) override {}
  std::optional<absl::Span<std::byte>> PlaceOf(PeerLink, absl::Span<const std::byte> header,
                                               size_t body_bytes) override {
    if (header.size() == sizeof(Asked)) return absl::Span<std::byte>();
    bodies_.push_back(std::make_unique<std::vector<std::byte>>(body_bytes));
    return absl::MakeSpan(*bodies_.back());
  }
  void OnMessage(PeerLink link, absl::Span<const std::byte> header,
                 absl::Span<std::byte> body) override {
    if (header.size() != sizeof(Asked)) {
      node_->Send(link, header, body, [this, data = body.data()] { Forget(data); });
      return;
    }
    Asked asked;
    std::memcpy(&asked, header.data(), sizeof(asked));
    if (asked.count == 0) {
      if (same_.size() < asked.bytes) same_.resize(asked.bytes);
      node_->Send(link, BytesOf(Answered{}), absl::MakeConstSpan(same_).first(asked.bytes),
                  nullptr);
    }
    for (uint64_t i = 0; i < asked.count; ++i) {
      const Answered answer = {.seed = asked.seed + i};
      bodies_.push_back(
          std::make_unique<std::vector<std::byte>>(ContentsOf(answer.seed, asked.bytes)));
      const std::vector<std::byte>& contents = *bodies_.back();
      node_->Send(link, BytesOf(answer), contents,
                  [this, data = contents.data()] { Forget(data); });
    }
  }
  void OnLost(PeerLink, const absl::Status&) override {}
  void OnTick() override {}

 private:
  void Forget(const std::byte* data) {
    std::erase_if(bodies_, [&](const auto& body) { return body->data() == data; });
  }

  PeerNode* node_ = nullptr;
  std::vector<std::byte> same_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> bodies_;
};

class PeerProcess {
 public:
  explicit PeerProcess(const std::string& transports) {
    int pipes[2];
    if (pipe(pipes) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) Serve(transports, pipes[1]);
    char text[64] = {};
    const ssize_t got = read(pipes[0], text, sizeof(text) - 1);
    address_ = std::string(text, static_cast<size_t>(std::max<ssize_t>(got, 0)));
    close(pipes[0]);
    close(pipes[1]);
  }
  ~PeerProcess() { Kill(); }

  void Signal(int number) const { kill(pid_, number); }
  void Kill() {
    if (pid_ <= 0) return;
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  const std::string& address() const { return address_; }

 private:
  [[noreturn]] static void Serve(const std::string& transports, int out) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    AnsweringHandler handler;
    auto node = PeerNode::Create({.transports = transports}, handler);
    if (!node.ok()) _exit(1);
    const std::string& address = (*node)->address();
    if (write(out, address.data(), address.size()) < 0) _exit(1);
    for (;;) pause();
  }

  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace kvasir::kvstore
