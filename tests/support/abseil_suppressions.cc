// Abseil comes from the distribution without ThreadSanitizer's instrumentation. Half of the
// reference count of absl::Status is taken down inside it: the last copy of a status that two
// threads shared looks like a race when it goes. Linked into tests with threads of our own.
#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:absl::*::Status::Unref\nrace:libabsl_status.so\n";
}
#endif
