#include "kernels/sparse/art/unread_mass.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/attention/reading_order.h"
#include "kernels/paged/compact_positions.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr int64_t kLayer = AttentionShape{}.layer;
constexpr int64_t kContext = 1500;
constexpr double kRounding = 1e-4;  // of float32 bounds that are reached

std::vector<AttentionShape> Shapes() {
  return {{.activation = DType::kFloat32, .kv = DType::kFloat32, .head_dim = 64},
          {.activation = DType::kFloat32, .kv = DType::kBFloat16, .head_dim = 128},
          {.activation = DType::kBFloat16, .kv = DType::kBFloat16, .head_dim = 64, .group = 7},
          {.activation = DType::kFloat32, .kv = DType::kFloat32, .head_dim = 24, .group = 1}};
}

// x as rotated to a position, in the dtype that it is kept in.
std::vector<float> RotatedTo(const RopePositions* rope, DType dtype, std::vector<float> x,
                             int64_t position) {
  if (rope == nullptr) return x;
  if (dtype == DType::kFloat32) {
    rope->Rotate(x.data(), dtype, 1, position);
    return x;
  }
  std::vector<BFloat16> narrow(x.begin(), x.end());
  rope->Rotate(narrow.data(), dtype, 1, position);
  std::transform(narrow.begin(), narrow.end(), x.begin(),
                 [](BFloat16 value) { return static_cast<float>(value); });
  return x;
}

// Sum of exp(logit) over the tokens of a page, as attention computes them.
double MassOf(AttentionBatch& batch, const TerminatedRow& row, const PageStep& step, int64_t g) {
  const AttentionShape& shape = batch.shape();
  const float* query = batch.q(row.tile.first_row, row.kv_head * shape.group + g);
  const std::vector<float> q =
      RotatedTo(batch.rope(), shape.activation, {query, query + shape.head_dim},
                QueryPosition(row.header, row.tile.first_position));
  double mass = 0;
  for (uint64_t rest = step.mask; rest != 0; rest &= rest - 1) {
    const int64_t t = step.page * kPageTokens + std::countr_zero(rest);
    const std::byte* token = batch.kv().Token(Side::kKey, row.tile.slot, t, kLayer, row.kv_head);
    std::vector<float> key(static_cast<size_t>(shape.head_dim));
    for (int64_t i = 0; i < shape.head_dim; ++i) {
      key[static_cast<size_t>(i)] = batch.kv().Get(token, i);
    }
    key = RotatedTo(batch.rope(), shape.kv, key, TokenPosition(row.header, step.entry, t));
    double dot = 0;
    for (size_t i = 0; i < q.size(); ++i) dot += double{q[i]} * double{key[i]};
    mass += std::exp(double{row.params.scale} * dot);
  }
  return mass;
}

// Whole pages, and pages of which few tokens were chosen and fewer are live; the others not at all.
std::vector<SelectionEntry> SomePages(std::mt19937_64& rng) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 1; page < 21; ++page) {
    if (page % 5 == 0) continue;
    const uint64_t chosen = page % 2 == 0 ? ~uint64_t{0} : (rng() & rng()) | 1;
    entries.push_back({.page = page, .chosen = chosen, .live = chosen & (rng() | 1)});
  }
  return entries;
}

void ExpectNoLessThanTheMass(AttentionBatch& batch, const AttendParams& params, int64_t kv_head) {
  const AttentionShape& shape = batch.shape();
  const SelectionHeader& header = params.selection.header(kv_head);
  std::vector<PageStep> steps(24);
  const int64_t count = ListSteps(
      SelectedPages(header, params.selection.list(kv_head), kContext - 1), 21, steps.data());
  ASSERT_EQ(count, 17);  // the first is of the sink
  const TerminatedRow row = {.params = params,
                             .tile = batch.blocks()[0],
                             .header = header,
                             .kv_head = kv_head,
                             .num_steps = count,
                             .skippable = std::span(steps).subspan(1, 16)};
  ScratchPieces counted(nullptr);
  UnreadMass::Take(counted, shape.group, shape.head_dim, 16);
  Scratch scratch;
  ScratchPieces pieces(scratch.Reserve(counted.bytes()).value());
  UnreadMass unread(row, UnreadMass::Take(pieces, shape.group, shape.head_dim, 16));
  unread.Make();
  for (int64_t g = 0; g < shape.group; ++g) {
    double mass = 0;
    for (int64_t next = 15; next >= 0; --next) {
      mass += MassOf(batch, row, row.skippable[static_cast<size_t>(next)], g);
      EXPECT_GE(unread.Share({.max = 0, .sum = 1}, g, next), mass * (1 - kRounding)) << next;
    }
  }
}

// Gives all tokens of a page the keys of its first: then page bounds are tight, and where keys are
// un-rotated only how far a token turns against the page's middle parts its logit from the bound.
void MakePagesUniform(AttentionBatch& batch) {
  for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
    for (int64_t t = 0; t < kContext; ++t) {
      const auto token = [&](int64_t i) {
        return batch.kv().Token(Side::kKey, 0, i, kLayer, head);
      };
      for (int64_t i = 0; i < batch.shape().head_dim; ++i) {
        batch.kv().Set(token(t), i, batch.kv().Get(token(t / kPageTokens * kPageTokens), i));
      }
    }
  }
  for (int64_t block = 0; block * kPageTokens < kContext; ++block) {
    KVASIR_CHECK(RebuildBounds(batch.kv().View(), 0, block, kPageTokens).ok());
  }
}

class UnreadMassTest : public testing::TestWithParam<std::tuple<AttentionShape, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(Keys, UnreadMassTest,
                         testing::Combine(testing::ValuesIn(Shapes()), testing::Bool(),
                                          testing::Bool()));

TEST_P(UnreadMassTest, IsNoLessThanTheMassOfThePages) {
  const auto [shape, compact, uniform] = GetParam();
  AttentionBatch batch(shape, 1, kContext, 60);
  if (compact) batch.UseCompactPositions(1.25);
  batch.FillContext(0, kContext);
  if (uniform) MakePagesUniform(batch);
  batch.AddBlock(0, kContext - 1, 1,
                 [&](int64_t) { return SelectList(64, 1400, SomePages(batch.rng())); });
  for (int64_t head = 0; head < batch.heads(); ++head) {
    for (int64_t i = 0; i < shape.head_dim; ++i) batch.q(0, head)[i] *= 4;
  }
  batch.Run(AttendReference);  // makes positions known
  const AttendParams params = batch.Params();
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    ExpectNoLessThanTheMass(batch, params, head);
  }
}

}  // namespace
}  // namespace kvasir::kernels
