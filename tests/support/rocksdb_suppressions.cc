// RocksDB comes from the distribution without ThreadSanitizer's instrumentation, so its own locks
// are invisible and its threads look like races with each other. Linked into tests that open one.
#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:librocksdb.so\ncalled_from_lib:librocksdb.so\n";
}
#endif
