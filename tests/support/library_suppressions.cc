// Libraries come from the distribution without ThreadSanitizer's instrumentation. gRPC and Abseil
// lock with absl::Mutex and RocksDB with locks of its own, which it cannot see: whatever one of
// their threads hands to another looks like a race, also within OpenSSL, which gRPC calls for TLS.
// Linked into programs and tests that use them. Our own threads also meet in engine_loop_test,
// without gRPC and without these.
#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:libgrpc.so\ncalled_from_lib:libgrpc.so\n"
         "race:libgrpc++.so\ncalled_from_lib:libgrpc++.so\n"
         "race:libgpr.so\ncalled_from_lib:libgpr.so\n"
         "race:libssl.so\ncalled_from_lib:libssl.so\n"
         "race:libcrypto.so\ncalled_from_lib:libcrypto.so\n"
         "race:librocksdb.so\ncalled_from_lib:librocksdb.so\n"
         "race:absl::*::Status::Unref\nrace:libabsl_status.so\n"
         "race:libabsl_graphcycles_internal.so\nrace:libabsl_time_zone.so\n"
         "race:libabsl_strings.so\n"
         "race:libabsl_cord.so\nrace:libabsl_cord_internal.so\n";
}
#endif
