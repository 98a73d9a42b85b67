// Ranks as processes of this machine, for tests and benchmarks that need separate processes: each
// has a GPU, and may be killed. This process passes rendezvous entries on, as the coordinator does,
// and must not have used CUDA before.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <poll.h>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "worker/parallel/rendezvous.h"

namespace kvasir::worker {

// A message is two strings, each after its length.
class EntrySocket {
 public:
  explicit EntrySocket(int file) : file_(file) {}

  bool Write(const std::string& key, const std::string& value) const {
    return WriteString(key) && WriteString(value);
  }
  bool Read(std::string& key, std::string& value) const {
    return ReadString(key) && ReadString(value);
  }
  int file() const { return file_; }

 private:
  bool WriteString(const std::string& text) const {
    const uint64_t size = text.size();
    return send(file_, &size, sizeof(size), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(size)) &&
           send(file_, text.data(), size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
  }
  bool ReadString(std::string& text) const {
    uint64_t size = 0;
    if (recv(file_, &size, sizeof(size), MSG_WAITALL) != static_cast<ssize_t>(sizeof(size))) {
      return false;
    }
    text.resize(size);
    return size == 0 || recv(file_, text.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size);
  }

  int file_;
};

// Passes the entries of each process to all others, until all have ended.
inline void RelayEntries(const std::vector<EntrySocket>& sockets) {
  std::vector<pollfd> polls;
  for (const EntrySocket& socket : sockets) polls.push_back({socket.file(), POLLIN, 0});
  std::string key, value;
  for (size_t open = sockets.size(); open > 0;) {
    poll(polls.data(), polls.size(), -1);
    for (size_t from = 0; from < polls.size(); ++from) {
      if (polls[from].fd < 0 || polls[from].revents == 0) continue;
      if (!sockets[from].Read(key, value)) {
        polls[from].fd = -1;
        --open;
        continue;
      }
      for (size_t to = 0; to < polls.size(); ++to) {
        if (to != from && polls[to].fd >= 0) sockets[to].Write(key, value);
      }
    }
  }
}

// Runs body(rank, rendezvous) in `size` processes and returns how each ended, as wait(2) reports
// it. The exit status is the result of body. Once rank 0 has ended, stopped processes are killed.
inline std::vector<int> RunRankProcesses(
    int size, const std::function<int(int rank, Rendezvous& rendezvous)>& body) {
  std::fflush(nullptr);
  std::vector<EntrySocket> sockets;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
    const pid_t process = fork();
    if (process < 0) std::abort();
    if (process == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      for (const EntrySocket& other : sockets) close(other.file());
      const EntrySocket socket(ends[1]);
      Rendezvous rendezvous([&socket](const std::string& key, const std::string& value) {
        socket.Write(key, value);
      });
      std::thread([&socket, &rendezvous] {
        std::string key, value;
        while (socket.Read(key, value)) rendezvous.Deliver(key, value);
      }).detach();
      const int status = body(rank, rendezvous);
      std::fflush(nullptr);
      _exit(status);
    }
    close(ends[1]);
    sockets.emplace_back(ends[0]);
    processes.push_back(process);
  }
  std::thread relay([&sockets] { RelayEntries(sockets); });
  std::vector<int> statuses(processes.size());
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    waitpid(processes[rank], &statuses[rank], 0);
    if (rank > 0) continue;
    for (size_t other = 1; other < processes.size(); ++other) {
      siginfo_t stopped = {};
      const auto id = static_cast<id_t>(processes[other]);
      if (waitid(P_PID, id, &stopped, WSTOPPED | WNOHANG | WNOWAIT) == 0 && stopped.si_pid != 0) {
        kill(processes[other], SIGKILL);
      }
    }
  }
  relay.join();
  for (const EntrySocket& socket : sockets) close(socket.file());
  return statuses;
}

}  // namespace kvasir::worker
