// The PTX that the kernels use, one function an instruction: barriers on shared memory, bulk
// copies, clusters, and the clock. Names follow the PTX ISA (sections "mbarrier", "cp.async.bulk",
// "barrier.cluster"). sm_90 or later. Products of a warpgroup: wgmma/wgmma.cuh.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>

namespace kvasir::kernels::hopper {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier: a phase ends once all arrivals and all announced bytes have come ---

__device__ inline void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Makes `count` arrivals at once.
__device__ inline void BarrierArrive(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(count)
               : "memory");
}
__device__ inline void BarrierArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Arrives at the same barrier of CTA `rank` of the cluster, which says nothing of this thread's
// writes: a release to a cluster would wait for all memory, some hundred cycles.
__device__ inline void BarrierArriveIn(uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
// Waits until the phase of parity `parity` has ended.
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// --- a copy of 16 or 4 bytes, global to shared memory; both addresses are multiples of that ---

__device__ inline void CopyPart(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ inline void CopyWord(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// Makes one of the barrier's arrivals once all copies begun by this thread have ended. wgmma sees
// the copies after a thread that waited for the barrier calls FenceAsyncProxy.
__device__ inline void BarrierArriveOnCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// --- the bulk tensor copy, global to shared memory ---

// Copies the map's box whose first element is (column, row) and announces its end to the barrier.
__device__ inline void CopyBox(void* to, const CUtensorMap* map, int32_t column, int32_t row,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row)
      : "memory");
}
// CopyBox of what is read once: it leaves the L2 cache first.
__device__ inline void CopyBoxOnce(void* to, const CUtensorMap* map, int32_t column, int32_t row,
                                   uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], policy;\n"
      "}\n" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row)
      : "memory");
}
// CopyBox of a map with four dimensions, from the start of all but the second.
__device__ inline void CopyRowsOf4(void* to, const CUtensorMap* map, int32_t row,
                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %3, %3}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(0), "r"(row)
      : "memory");
}
__device__ inline void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies `bytes` contiguous bytes and announces their end to the barrier. The size and both
// addresses are multiples of 16. The bytes are read once, so they are marked to leave the L2 cache
// first.
__device__ inline void CopyOnce(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], policy;\n"
      "}\n" ::"r"(SharedAddress(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Prefetches the 128 bytes around `from` into the L2 cache.
__device__ inline void PrefetchLine(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Prefetches `bytes` contiguous bytes into the L2 cache. The size and the address are multiples of
// 16.
__device__ inline void PrefetchRange(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and to the copy engine, once a
// barrier follows.
__device__ inline void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Adds to a word of device memory and returns its old value. The caller then sees the writes of
// every CTA that added before, and every CTA that adds later sees the caller's.
__device__ inline uint32_t AddAndSee(uint32_t* word, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(value)
               : "memory");
  return before;
}
// Synchronises `threads` threads on the hardware barrier `id` (0 is __syncthreads).
__device__ inline void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at the barrier without waiting. Called by whole warps.
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns 2^x to two units in the last place, and 0 for subnormal results.
__device__ inline float Exp2(float x) {
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- clusters: CTAs that run side by side and reach each other's shared memory ---

// Returns this CTA's index in its cluster.
__device__ inline unsigned ClusterRank() {
  unsigned rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Returns the number of CTAs of the cluster.
__device__ inline unsigned ClusterBlocks() {
  unsigned blocks = 0;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}
// Waits for all threads of the cluster, and makes their earlier writes visible.
__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// ClusterSync in two steps, with independent work between them.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
// ClusterArrive without making this thread's writes visible to the others.
__device__ inline void ClusterArriveBare() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Returns the address in CTA `rank` that corresponds to `place` in this one.
template <typename T>
__device__ T* OfBlock(T* place, unsigned rank) {
  uint64_t there = 0;
  asm volatile("mapa.u64 %0, %1, %2;"
               : "=l"(there)
               : "l"(reinterpret_cast<uint64_t>(place)), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// --- the clock, for waits with a bound ---

__device__ inline uint64_t NowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace kvasir::kernels::hopper
