// jemalloc reads this before main. A thread of its own gives freed memory back to the system after
// a second: a server that shares its machine should not keep what a burst once needed.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf =
    "background_thread:true,max_background_threads:1,dirty_decay_ms:1000,muzzy_decay_ms:0";
}
