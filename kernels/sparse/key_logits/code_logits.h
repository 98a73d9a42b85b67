// Logits of queries and whole pages of key codes (paged/key_codes.h), for callers that read every
// key of a context. Queries are coded in 8 bits, so the products are integers: the same in every
// form and faster than products of decoded keys (KeyLogits). The error of 8 bits is small beside
// that of the 4-bit key codes: a key's codes count from the middle of their range.
// Thread-compatible.
#pragma once

#include <cstdint>

#include "kernels/base/scratch.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_tile.h"

namespace kvasir::kernels {

class CodeLogits {
 public:
  struct Memory {
    Memory(ScratchPieces& pieces, const SelectParams& params);
    uint32_t* quads;  // as CodedQueries::quads
    float* steps;
    int32_t* code_sums;
    float* sums;
    uint32_t* transposed;  // [words of a key, kTileKeys]
  };

  // Codes the group's queries [G, head_dim]. REQUIRES: the KV has key codes.
  CodeLogits(const SelectRow& row, const float* queries, const Memory& memory);

  // Writes the unscaled logits [G, kTileKeys] of the page's tokens. Those of tokens that do not
  // exist are unspecified. A query with NaN has NaN logits. REQUIRES: the slot has the page.
  void Logits(int64_t page, float* logits) const;
  // REQUIRES: the page is not after the slot's last.
  bool Has(int64_t page) const { return row_.p.kv.extent(row_.tile.slot, page) >= 0; }
  void Prefetch(int64_t page) const;

 private:
  void CodeQuery(int64_t g, const float* query, const Memory& memory);

  const SelectRow& row_;
  const KeyTileFunctions& functions_;
  uint32_t* const transposed_;
  CodedQueries queries_;
};

}  // namespace kvasir::kernels
