// Threads with a name that the system shows, in `top -H`, debuggers and /proc/PID/task/*/comm.
// Used by coordinator and proto for their long-lived threads.
#pragma once

#include <pthread.h>
#include <thread>
#include <utility>

namespace kvasir::proto {

// Starts a thread that does `work`. REQUIRES: `name` is a literal of at most 15 bytes.
template <typename Work>
std::thread NamedThread(const char* name, Work work) {
  return std::thread([name, work = std::move(work)]() mutable {
    pthread_setname_np(pthread_self(), name);
    work();
  });
}

}  // namespace kvasir::proto
