// Limits and signals of a server's process, set before it starts threads. Called by main functions.
#pragma once

#include <cstdint>

namespace kvasir::proto {

// Raises the soft limit of open descriptors to the hard one and returns it.
int64_t RaiseDescriptorLimit();

// Ignores SIGUSR1, SIGUSR2 and SIGALRM. They mean nothing to this process and would end it
// silently.
void IgnoreStraySignals();

}  // namespace kvasir::proto
