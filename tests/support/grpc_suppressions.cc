// gRPC and Abseil come from the distribution without ThreadSanitizer's instrumentation and lock
// with absl::Mutex, which it cannot see: whatever gRPC hands from one of its threads to another
// looks like a race, also within OpenSSL, which it calls for TLS. Linked into programs and tests
// that talk gRPC. Our own threads also meet in engine_loop_test, without gRPC and without these.
#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:libgrpc.so\ncalled_from_lib:libgrpc.so\n"
         "race:libgrpc++.so\ncalled_from_lib:libgrpc++.so\n"
         "race:libgpr.so\ncalled_from_lib:libgpr.so\n"
         "race:libssl.so\ncalled_from_lib:libssl.so\n"
         "race:libcrypto.so\ncalled_from_lib:libcrypto.so\n"
         "race:absl::*::Status::Unref\nrace:libabsl_status.so\n"
         "race:libabsl_graphcycles_internal.so\nrace:libabsl_time_zone.so\n"
         "race:libabsl_strings.so\n"
         "race:libabsl_cord.so\nrace:libabsl_cord_internal.so\n";
}
#endif
