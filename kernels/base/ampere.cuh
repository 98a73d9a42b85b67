// Asynchronous copies and the warp's matrix product: one function an instruction, as in the PTX ISA
// (sections "cp.async", "mma"). Needs sm_80 or later.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace kvasir::kernels {

// --- asynchronous copies of the calling thread ---

// Copies 16 bytes of global memory, aligned to 16; writes zeros where `is_there` is false. Bypasses
// the L1 cache, because the bytes are read once.
__device__ inline void CopyAsync16(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
// Copies 4 bytes, aligned to 4.
__device__ inline void CopyAsync4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// Makes one group of the copies begun since the last call.
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the `kPending` youngest groups are under way.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- matrix products of a warp ---

// Four matrices of 8 x 8 elements of 16 bits, from shared memory: lane 8 i + r gives the address of
// row r of matrix i, 16 bytes aligned as such. Lane 4 g + t holds, of each, the elements (g, 2 t)
// and (g, 2 t + 1).
__device__ inline uint4 LoadMatricesAt(uint32_t shared_address) {
  uint4 d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(shared_address)
               : "memory");
  return d;
}
__device__ inline uint4 LoadMatrices(const void* row) {
  return LoadMatricesAt(static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}
// The same of the matrices transposed: lane 4 g + t holds the elements (2 t, g) and (2 t + 1, g).
__device__ inline uint4 LoadTransposedAt(uint32_t shared_address) {
  uint4 d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(shared_address)
               : "memory");
  return d;
}

// d[16, 8] += a[16, 16] b[16, 8], with bfloat16 operands, two in a register, and float sums. Lane 4
// g + t holds these elements: of a (g, 2 t), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8) and the
// right neighbour of each; of b (2 t, g), (2 t + 8, g) and the one below each; of d (g, 2 t), (g +
// 8, 2 t) and the right neighbour of each.
__device__ inline void Mma16x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with float16 operands. Subnormal numbers keep their value.
__device__ inline void Mma16x8Float16(float (&d)[4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace kvasir::kernels
