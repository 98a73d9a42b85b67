// Counts what a thread allocates, for tests that bound it. Linking counting_allocator.cc replaces
// operator new of the whole test program.
#pragma once

#include <cstddef>

namespace kvasir::testing {

// By the calling thread, since it began; what was freed counts too.
size_t AllocatedBytes();

}  // namespace kvasir::testing
