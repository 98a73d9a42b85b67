// Turns Ctrl-C into the end of an answer: while one of these lives, SIGINT does not end the
// program. Made before any other thread is, because threads inherit that they do not take the
// signal. Thread-safe.
#pragma once

#include <csignal>
#include <functional>
#include <thread>

#include "grpcpp/client_context.h"

#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

class InterruptWatch {
 public:
  // `idle` is called, on another thread, for a Ctrl-C while no call is watched.
  explicit InterruptWatch(std::function<void()> idle);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  // Ctrl-C cancels this call from now on; null: none.
  void SetCall(grpc::ClientContext* call) EXCLUDES(mu_);

 private:
  void Run() EXCLUDES(mu_);

  const std::function<void()> idle_;
  sigset_t interrupt_;
  sigset_t before_;  // signals that were blocked before
  kernels::Mutex mu_;
  grpc::ClientContext* call_ GUARDED_BY(mu_) = nullptr;
  bool ending_ GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvasir::coordinator
