// The PTX that Hopper's kernels use, one function an instruction: barriers on shared memory, bulk
// copies, clusters, warpgroup matrix products and their shared-memory descriptors. Names follow the
// PTX ISA (sections "mbarrier", "cp.async.bulk", "barrier.cluster", "wgmma"). sm_90a.
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
// CopyBox to the same place in every CTA of `blocks`, a bit each, and to the same barrier of each.
__device__ inline void CopyBoxToBlocks(void* to, const CUtensorMap* map, int32_t column,
                                       int32_t row, uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "h"(blocks)
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

// --- wgmma: products of a warpgroup, operands in shared memory ---

// Tiles have rows of 128 bytes, swizzled: the 16-byte piece c of row r is stored as piece c ^ (r %
// 8). Groups of 8 rows are 1,024 bytes apart, and tiles are aligned to 1,024 bytes.
inline constexpr int kSwizzledRowBytes = 128;
inline constexpr int kSwizzledGroupBytes = 1024;

__device__ inline int SwizzledOffset(int row, int column_bytes) {
  return row * kSwizzledRowBytes + (column_bytes ^ ((row & 7) << 4));
}
// Returns the descriptor of a swizzled tile at `tile`, for either operand and either major order.
__device__ inline uint64_t TileDescriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{kSwizzledGroupBytes >> 4} << 32;
  constexpr uint64_t kUnusedStride = uint64_t{1} << 16;
  return kSwizzle128 | kGroupStride | kUnusedStride | ((SharedAddress(tile) & 0x3ffff) >> 4);
}
// Returns the descriptor of an operand that is contiguous along its rows: two tiles kTileBytes
// apart.
template <int kTileBytes>
__device__ inline uint64_t PairDescriptor(const void* tile) {
  constexpr uint64_t kUnusedStride = uint64_t{1} << 16;
  constexpr uint64_t kTileStride = uint64_t{kTileBytes >> 4} << 16;
  return TileDescriptor(tile) - kUnusedStride + kTileStride;
}
// Moves the descriptor by `bytes` (a multiple of 16). The address is in the lower half.
__device__ inline uint64_t Advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Sets the number of registers of each thread of this warpgroup, by all of its threads: fewer than
// the launch gave, or more once other warpgroups have given them up. Multiples of 8.
template <int kRegisters>
__device__ inline void FewerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void MoreRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

enum class Major { kK = 0, kMN = 1 };  // which index of an operand is contiguous

// d[64, 8] (+)= a[64, 16] b[16, 8], with bfloat16 operands and float sums; b is K-major. Thread t
// of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 (+ 8 for d[2], d[3]) and columns 2 (t % 4) +
// {0, 1}.
template <Major kMajorA>
__device__ inline void Wgmma64x8(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
      " {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
}

// The same with a in registers, laid out as for Wgmma64x64 below. Adds to d.
__device__ inline void Wgmma64x8(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64, 64] (+)= a[64, 16] b[16, 64], a K-major in shared memory. Thread t holds the rows of
// Wgmma64x8; d[4 j + 2 i + e] is row + 8 i, column 8 j + 2 (t % 4) + e.
template <Major kMajorB>
__device__ inline void Wgmma64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, %35;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorB)));
}
// The same with a in registers: a[i] holds two bfloat16 of row + 8 (i % 2), columns
// 2 (t % 4) + 8 (i / 2) + {0, 1}.
template <Major kMajorB>
__device__ inline void Wgmma64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                  bool accumulate = true) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(static_cast<int>(kMajorB)));
}
// d[64, 128] += a[64, 16] b[16, 128], with a in registers and b of a PairDescriptor. d is laid out
// as for Wgmma64x64, with j up to 15.
__device__ inline void Wgmma64x128(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64, n] += a[64, 16] b[16, n], both K-major in shared memory, for n of 16, 32 and 128. d is
// laid out as for Wgmma64x64, with j below n / 8.
__device__ inline void Wgmma64x16(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, 1, 1, 1, 0, 0;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b));
}
__device__ inline void Wgmma64x32(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, 1, 1, 1, 0, 0;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
}
__device__ inline void Wgmma64x128(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, 1, 1, 1, 0, 0;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b));
}

}  // namespace kvasir::kernels::hopper
