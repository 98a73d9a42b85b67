#include "proto/process.h"

#include <initializer_list>
#include <signal.h>
#include <sys/resource.h>

namespace kvasir::proto {

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int64_t>(limit.rlim_cur);
}

void IgnoreStraySignals() {
  for (const int signal_number : {SIGUSR1, SIGUSR2, SIGALRM}) signal(signal_number, SIG_IGN);
}

}  // namespace kvasir::proto
