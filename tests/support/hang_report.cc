// Linked into every GoogleTest binary: a case that runs for longer than KVASIR_TEST_HANG_SECONDS of
// the environment is named, the stacks of all threads are printed and the process ends, before ctest
// kills it without a word. kvasir_test sets the variable; without it, as in a debugger, there is no
// limit.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/debugging/symbolize.h"

namespace kvasir::testing {
namespace {

constexpr int kMaxDepth = 32;
const char* const kLimit = std::getenv("KVASIR_TEST_HANG_SECONDS");
constexpr useconds_t kOneStack = 200'000;  // microseconds that a thread gets to print its stack

void PrintStack(int /*signal*/) {
  void* frames[kMaxDepth];
  const int depth = ::backtrace(frames, kMaxDepth);
  std::fprintf(stderr, "thread %ld:\n", ::syscall(SYS_gettid));
  for (int i = 0; i < depth; ++i) {
    char name[512];
    // The return address may be the first of the next function.
    const void* const call = static_cast<const char*>(frames[i]) - 1;
    std::fprintf(stderr, "  %p %s\n", frames[i],
                 absl::Symbolize(call, name, sizeof(name)) ? name : "?");
  }
}

// Runs in a signal handler. It may wait for a lock that the interrupted thread holds; ctest then
// ends the process.
void Report(int /*signal*/) {
  const ::testing::TestInfo* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::fprintf(stderr, "HANG: %s.%s runs for more than %s s\n", test->test_suite_name(),
               test->name(), kLimit);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ::syscall(SYS_tgkill, ::getpid(), std::stol(task.path().filename()), SIGUSR2);
    ::usleep(kOneStack);
  }
  std::abort();
}

class HangReport : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override {
    std::signal(SIGALRM, Report);
    std::signal(SIGUSR2, PrintStack);
    ::alarm(static_cast<unsigned>(std::strtoul(kLimit, nullptr, 10)));
  }
  void OnTestEnd(const ::testing::TestInfo& /*test*/) override { ::alarm(0); }
};

const bool kAdded = [] {
  if (kLimit == nullptr) return false;
  absl::InitializeSymbolizer("/proc/self/exe");
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads the unwinder, which a signal handler should not
  ::testing::UnitTest::GetInstance()->listeners().Append(new HangReport);
  return true;
}();

}  // namespace
}  // namespace kvasir::testing
