// A unix socket in front of another one, which passes bytes on until the test freezes it: then the
// connection stays open and nothing moves, as when a machine is gone or a process is stopped.
// Serves one connection. Thread-safe.
#pragma once

#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include "gtest/gtest.h"

#include "kernels/base/mutex.h"

namespace kvasir::testing {

class FreezingRelay {
 public:
  // Paths of sockets, without "unix:".
  FreezingRelay(const std::string& listen_path, std::string target_path)
      : listener_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    const sockaddr_un address = Address(listen_path);
    ::unlink(listen_path.c_str());
    EXPECT_EQ(::bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_, 1), 0);
    thread_ = std::thread([this, target = std::move(target_path)] { Serve(target); });
  }
  ~FreezingRelay() {
    Set(State::kEnding);
    ::shutdown(listener_, SHUT_RDWR);
    {
      kernels::MutexLock lock(mu_);
      for (int fd : {near_, far_}) {
        if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
      }
    }
    thread_.join();
    ::close(listener_);
  }

  void Freeze() { Set(State::kFrozen); }

 private:
  enum class State { kPassing, kFrozen, kEnding };

  static sockaddr_un Address(const std::string& path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    EXPECT_LT(path.size(), sizeof(address.sun_path));
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    return address;
  }

  void Set(State state) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    state_ = state;
    changed_.NotifyAll();
  }

  void Serve(const std::string& target) {
    const int near = ::accept(listener_, nullptr, nullptr);
    if (near < 0) return;
    const int far = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un address = Address(target);
    EXPECT_EQ(::connect(far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    {
      kernels::MutexLock lock(mu_);
      near_ = near;
      far_ = far;
    }
    std::thread back([&] { Pump(far, near); });
    Pump(near, far);
    back.join();
    kernels::MutexLock lock(mu_);
    near_ = far_ = -1;
    ::close(near);
    ::close(far);
  }

  void Pump(int from, int to) EXCLUDES(mu_) {
    char buffer[4096];
    for (;;) {
      const ssize_t got = ::read(from, buffer, sizeof(buffer));
      if (got <= 0) break;
      {
        kernels::MutexLock lock(mu_);
        while (state_ == State::kFrozen) changed_.Wait(mu_);
      }
      if (::send(to, buffer, static_cast<size_t>(got), MSG_NOSIGNAL) != got) break;
    }
    ::shutdown(to, SHUT_WR);
  }

  const int listener_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  State state_ GUARDED_BY(mu_) = State::kPassing;
  int near_ GUARDED_BY(mu_) = -1;
  int far_ GUARDED_BY(mu_) = -1;
  std::thread thread_;
};

}  // namespace kvasir::testing
