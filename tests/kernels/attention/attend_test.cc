#include "kernels/attention/attend.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/attend_implementations.h"
#include "tests/support/attention_batch.h"
#include "tests/support/compare.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::ThreadExecutor;
using tests::Tolerance;
using Kind = SelectionHeader::Kind;
using Side = FakePagedKv::Side;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint64_t kWholePage = ~uint64_t{0};

// --- the oracle: the formula of attend.h in double precision, token by token ---

struct OracleResult {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};

bool Selected(const RowSelection& row, int64_t token) {
  const SelectionHeader& header = row.header;
  if (header.kind == Kind::kAll) return true;
  if (token < header.sink_end || token >= header.window_begin) return true;
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& entry = row.entries[static_cast<size_t>(i)];
    if (entry.page == token / kPageTokens) return (entry.live >> (token % kPageTokens) & 1) != 0;
  }
  return false;
}

// Returns a compact position: a token's own, or its rank among sink, chosen tokens and window.
int64_t CompactPosition(const RowSelection& row, int64_t token) {
  const SelectionHeader& header = row.header;
  if (header.kind == Kind::kAll || token < header.sink_end) return token;
  int64_t position = header.sink_end;
  for (const SelectionEntry& entry : row.entries) {
    for (int64_t t = 0; t < kPageTokens; ++t) {
      if ((entry.chosen >> t & 1) == 0) continue;
      if (entry.page * kPageTokens + t == token && token < header.window_begin) return position;
      ++position;
    }
  }
  return position + token - header.window_begin;
}

// Positions at which a query sees a key.
struct Places {
  int64_t query = 0;
  int64_t key = 0;
};

// SelfExtend as in its paper: within the window both at their own positions, else by groups.
Places GroupedPlaces(const GroupedPositions& grouped, int64_t query, int64_t key) {
  const int64_t g = grouped.group_size, w = grouped.window;
  if (query - key < w) return {.query = query, .key = key};
  return {.query = query / g + w - w / g, .key = key / g};
}

// Returns x, rotated when the batch's keys and queries are not.
std::vector<double> Rotated(AttentionBatch& batch, std::vector<double> x, int64_t position) {
  if (batch.rope() == nullptr) return x;
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) * batch.InverseFrequency(static_cast<int64_t>(i));
    const double c = std::cos(angle) * batch.rope()->attention_scaling();
    const double s = std::sin(angle) * batch.rope()->attention_scaling();
    const double first = x[i], second = x[i + half];
    x[i] = first * c - second * s;
    x[i + half] = second * c + first * s;
  }
  return x;
}

OracleResult Oracle(AttentionBatch& batch, int64_t block_index, int64_t row, int64_t head) {
  const QueryBlock& block = batch.blocks()[static_cast<size_t>(block_index)];
  const int64_t kv_head = head / batch.shape().group;
  const int64_t d = batch.shape().head_dim;
  const RowSelection& selection = batch.selection(block_index, kv_head);
  const float* raw_q = batch.q(block.first_row + row, head);
  const int64_t position = block.first_position + row;
  std::vector<double> q;  // at q_position
  int64_t q_position = -1;
  const double scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<int64_t> tokens;
  std::vector<double> logits;
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t token = 0; token <= block.first_position + row; ++token) {
    if (!Selected(selection, token)) continue;
    const std::byte* key =
        batch.kv().Token(Side::kKey, block.slot, token, AttentionBatch::kLayer, kv_head);
    std::vector<double> k;
    for (int64_t i = 0; i < d; ++i) k.push_back(double{batch.kv().Get(key, i)});
    const Places places = batch.grouped().on()
                              ? GroupedPlaces(batch.grouped(), position, token)
                              : Places{.query = CompactPosition(selection, position),
                                       .key = CompactPosition(selection, token)};
    if (places.query != q_position) {
      q_position = places.query;
      q = Rotated(batch, {raw_q, raw_q + d}, q_position);
    }
    k = Rotated(batch, std::move(k), places.key);
    const double dot = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
    tokens.push_back(token);
    logits.push_back(dot * scale);
    max = std::max(max, logits.back());
  }
  OracleResult result;
  result.out.resize(static_cast<size_t>(d));
  double sum = 0;
  for (size_t j = 0; j < tokens.size(); ++j) {
    const double weight = std::exp(logits[j] - max);
    sum += weight;
    const std::byte* value =
        batch.kv().Token(Side::kValue, block.slot, tokens[j], AttentionBatch::kLayer, kv_head);
    for (int64_t i = 0; i < d; ++i) {
      result.out[static_cast<size_t>(i)] += weight * double{batch.kv().Get(value, i)};
    }
  }
  if (tokens.empty()) return result;
  for (double& x : result.out) x /= sum;
  result.lse = max + std::log(sum);
  return result;
}

// Outputs are averages of standard normal values: absolute tolerance. lse: relative when large.
void ExpectMatchesOracle(AttentionBatch& batch) {
  const bool bf16 = batch.shape().activation == DType::kBFloat16;
  // Rotated values are rounded to their previous dtype.
  const bool rounds = batch.rope() != nullptr && (bf16 || batch.shape().kv == DType::kBFloat16);
  const Tolerance out_tolerance = {.absolute = rounds ? 2e-2
                                               : bf16 ? 1e-2
                                                      : 5e-6,
                                   .relative = bf16 ? 4e-3 : 5e-6};
  const Tolerance lse_tolerance = {.absolute = rounds ? 2e-2 : 2e-6, .relative = 1e-6};
  const int64_t d = batch.shape().head_dim;
  std::vector<double> out, expected_out, lse, expected_lse;
  for (size_t b = 0; b < batch.blocks().size(); ++b) {
    const QueryBlock& block = batch.blocks()[b];
    for (int64_t r = 0; r < block.num_rows; ++r) {
      for (int64_t head = 0; head < batch.heads(); ++head) {
        const int64_t token = block.first_row + r;
        const OracleResult expected = Oracle(batch, static_cast<int64_t>(b), r, head);
        expected_out.insert(expected_out.end(), expected.out.begin(), expected.out.end());
        expected_lse.push_back(expected.lse);
        out.insert(out.end(), batch.out(token, head), batch.out(token, head) + d);
        lse.push_back(batch.lse(token, head));
      }
    }
  }
  const int64_t tokens = batch.num_tokens();
  EXPECT_TRUE(AllClose(lse, expected_lse, lse_tolerance, {tokens, batch.heads()})) << "lse";
  EXPECT_TRUE(AllClose(out, expected_out, out_tolerance, {tokens, batch.heads(), d})) << "out";
}

// --- selections ---

SelectionEntry Whole(int64_t page) {
  return {.page = page, .chosen = kWholePage, .live = kWholePage};
}

// Every page, as a list.
RowSelection ListOfEverything(int64_t first_position) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page <= first_position / kPageTokens; ++page) {
    entries.push_back(Whole(page));
  }
  return SelectList(0, first_position, std::move(entries));
}

// Some pages with random token masks, no sink, and a window of the tile's own tokens.
RowSelection ListWithHoles(int64_t first_position, std::mt19937_64& rng) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page < first_position / kPageTokens; ++page) {
    if (rng() % 3 == 0) {
      entries.push_back({.page = page, .chosen = kWholePage, .live = rng() & rng()});
    }
  }
  return SelectList(0, first_position, std::move(entries));
}

// --- the implementations under test ---

class AttendTest : public ::testing::TestWithParam<AttendImplementation> {
 protected:
  void Run(AttentionBatch& batch) { batch.Run(GetParam().run); }
};

INSTANTIATE_TEST_SUITE_P(Cpu, AttendTest, ::testing::ValuesIn(AttendImplementations()),
                         [](const auto& param) { return param.param.name; });

// --- comparing two batches ---

bool SameBits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

// Row `row` of `a` equals row `other` of `b`, bit by bit.
void ExpectSameRow(const AttentionBatch& a, int64_t row, const AttentionBatch& b, int64_t other) {
  for (int64_t head = 0; head < a.heads(); ++head) {
    EXPECT_TRUE(SameBits(a.out(row, head), b.out(other, head), a.shape().head_dim))
        << "row " << row << " head " << head;
    EXPECT_EQ(std::bit_cast<uint32_t>(a.lse(row, head)),
              std::bit_cast<uint32_t>(b.lse(other, head)))
        << "row " << row << " head " << head;
  }
}

void CopyQuery(AttentionBatch& from, int64_t row, AttentionBatch& to, int64_t other) {
  for (int64_t head = 0; head < from.heads(); ++head) {
    std::copy_n(from.q(row, head), from.shape().head_dim, to.q(other, head));
  }
}

// --- against the oracle ---

std::vector<AttentionShape> Shapes() {
  std::vector<AttentionShape> shapes;
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t head_dim : {64, 128, 24}) {
        for (const int64_t group : {1, 2, 3, 4, 5, 7, 8}) {
          if (head_dim != 64 && group != 4) continue;
          shapes.push_back({.activation = activation,
                            .kv = kv,
                            .head_dim = head_dim,
                            .kv_heads = 2,
                            .group = group});
        }
      }
    }
  }
  return shapes;
}

std::string Describe(const AttentionShape& shape) {
  return std::string("activation ") + DTypeName(shape.activation).data() + " kv " +
         DTypeName(shape.kv).data() + " head_dim " + std::to_string(shape.head_dim) + " group " +
         std::to_string(shape.group);
}

TEST_P(AttendTest, MatchesTheOracleOverShapesAndContexts) {
  for (const AttentionShape& shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/4, /*max_tokens=*/300, /*seed=*/11);
    int64_t slot = 0;
    for (const int64_t context : {1, 63, 64, 65}) {
      batch.FillContext(slot, context);
      batch.AddBlock(slot++, context - 1, 1);
    }
    Run(batch);
    ExpectMatchesOracle(batch);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, MatchesTheOracleAcrossSegments) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    const AttentionShape shape = {.kv = kv, .kv_heads = 1, .group = 2};
    AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/4200, /*seed=*/12);
    batch.FillContext(0, 4160);
    for (const int64_t context : {2047, 2048, 2049, 4096, 4100}) {
      batch.AddBlock(0, context - 1, 1);
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

TEST_P(AttendTest, MatchesTheOracleForEveryNumberOfRows) {
  const AttentionShape shape = {.kv = DType::kBFloat16, .kv_heads = 2, .group = 3};
  AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/320, /*seed=*/13);
  batch.FillContext(0, 320);
  for (int64_t rows = 1; rows <= 64; ++rows) batch.AddBlock(0, 256 - (rows % 3) * 64, rows);
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, BlocksMayBeginAnywhereInAPage) {
  const AttentionShape shape = {.kv_heads = 1, .group = 1};
  AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/192, /*seed=*/14);
  batch.FillContext(0, 192);
  for (const int64_t offset : {0, 1, 31, 62, 63}) {
    batch.AddBlock(0, 128 + offset, 64 - offset);
  }
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, MatchesTheOracleOverSelections) {
  for (const AttentionShape shape :
       {AttentionShape{.kv = DType::kFloat32}, AttentionShape{.kv = DType::kBFloat16},
        AttentionShape{.activation = DType::kBFloat16, .kv = DType::kBFloat16, .head_dim = 128}}) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/2, /*max_tokens=*/2304, /*seed=*/15);
    batch.FillContext(1, 2304);
    const auto add = [&](int64_t first, int64_t rows, auto make) {
      batch.AddBlock(1, first, rows, [&](int64_t) { return make(first); });
    };
    for (const int64_t rows : {1, 20, 64}) {
      const int64_t first = 2240 - (rows == 1 ? 1 : 0);
      add(first, rows, [](int64_t p) { return SelectList(0, p, {}); });         // own tokens only
      add(first, rows, [](int64_t p) { return SelectList(10, p - 100, {}); });  // sink and window
      add(first, rows, [](int64_t) { return SelectList(64, 1 << 20, {}); });    // sink only
      add(first, rows, [](int64_t) { return SelectList(0, 1 << 20, {}); });     // nothing at all
      add(first, rows, [](int64_t p) {
        return SelectList(70, p - 1, {Whole(1), Whole(17), Whole(33)});
      });
      add(first, rows, [&](int64_t p) { return ListWithHoles(p, batch.rng()); });
      add(first, rows, [](int64_t p) { return ListOfEverything(p); });
      add(first, rows, [](int64_t) {  // one token in a far page
        return SelectList(0, 1 << 20, {{.page = 20, .chosen = kWholePage, .live = 1ull << 63}});
      });
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

// Lists whose entries reach into sink and window, with pruned tokens. Both keep their positions.
TEST_P(AttendTest, MatchesTheOracleAtCompactPositions) {
  for (const AttentionShape& shape : Shapes()) {
    if (shape.group != 1 && shape.group != 4) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/448, /*seed=*/25);
    batch.UseCompactPositions(/*attention_scaling=*/1.1);
    batch.FillContext(0, 448);
    for (const int64_t rows : {1, 5}) {
      const int64_t first = 384 + (rows == 1 ? 63 : 0);
      const auto add = [&](auto make) {
        batch.AddBlock(0, first, rows, [&](int64_t) { return make(first); });
      };
      add([](int64_t p) { return SelectAll(p); });
      add([](int64_t p) { return SelectList(10, p - 100, {}); });
      add([](int64_t p) { return SelectList(70, p - 90, {Whole(1), Whole(3), Whole(5)}); });
      add([&](int64_t p) { return ListWithHoles(p, batch.rng()); });
      add([](int64_t p) {
        return SelectList(3, p - 1, {Whole(2), {.page = 5, .chosen = 0xf0f01, .live = 0x90001}});
      });
    }
    Run(batch);
    ExpectMatchesOracle(batch);
    if (HasFailure()) return;
  }
}

// Neighbourhoods that start in the tile's own page, in an earlier one, at a page's edge, and before
// the context; groups that cross pages.
constexpr GroupedPositions kGroupings[] = {{2, 1},   {7, 30},   {8, 64},  {3, 100},
                                           {5, 200}, {64, 333}, {4, 5000}};

TEST_P(AttendTest, MatchesTheOracleAtGroupedPositions) {
  for (AttentionShape shape : Shapes()) {
    if (shape.group != 4 || shape.activation != shape.kv || shape.head_dim == 128) continue;
    shape.kv_heads = 1;
    for (const GroupedPositions& grouped : kGroupings) {
      SCOPED_TRACE(testing::Message() << Describe(shape) << ", groups of " << grouped.group_size
                                      << " beyond " << grouped.window);
      AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/320, /*seed=*/27);
      batch.UseGroupedPositions(grouped, /*attention_scaling=*/1.1);
      batch.FillContext(0, 320);
      batch.AddBlock(0, 319, 1);
      batch.AddBlock(0, 256, 20);
      batch.AddBlock(0, 256, 3, [](int64_t) { return SelectList(70, 166, {Whole(1)}); });
      batch.AddBlock(0, 300, 3, [&](int64_t) { return ListWithHoles(256, batch.rng()); });
      batch.AddBlock(0, 0, 64);
      Run(batch);
      ExpectMatchesOracle(batch);
      if (HasFailure()) return;
    }
  }
}

// A context within the neighbourhood gives the bits of attention without groups.
TEST_P(AttendTest, WithinTheNeighbourhoodPositionsAreTheTokensOwn) {
  AttentionBatch grouped({}, 1, 448, 29), own({}, 1, 448, 29);
  grouped.UseGroupedPositions({.group_size = 4, .window = 448});
  own.UseCompactPositions();
  for (AttentionBatch* batch : {&grouped, &own}) {
    batch->FillContext(0, 448);
    batch->AddBlock(0, 384, 64);
  }
  Run(grouped);
  Run(own);
  for (int64_t row = 0; row < 64; ++row) ExpectSameRow(grouped, row, own, row);
}

// The same bits as with a cache of rotated keys, so that short contexts equal those of a server
// without position extension.
TEST_P(AttendTest, AllAtCompactPositionsHasTheBitsOfRotatedKeys) {
  for (const AttentionShape& shape : Shapes()) {
    if (shape.activation != shape.kv) continue;  // q and k come from one matrix product's dtype
    SCOPED_TRACE(Describe(shape));
    AttentionBatch rotated(shape, 1, 300, 26), unrotated(shape, 1, 300, 26);
    SerialExecutor executor;
    unrotated.UseCompactPositions();
    unrotated.rope()->Reserve(300, executor);
    const auto rotate = [&](void* x, int64_t position) {
      unrotated.rope()->Rotate(x, shape.kv, 1, position);
    };
    for (AttentionBatch* batch : {&rotated, &unrotated}) {
      batch->FillContext(0, 300);
      batch->AddBlock(0, 256, 44);
      batch->AddBlock(0, 299, 1);
    }
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (int64_t t = 0; t < 300; ++t) {
        rotate(rotated.kv().Token(Side::kKey, 0, t, AttentionBatch::kLayer, head), t);
      }
    }
    for (int64_t row = 0; row < 45; ++row) {
      for (int64_t head = 0; head < rotated.heads(); ++head) {
        float* q = rotated.q(row, head);
        std::vector<BFloat16> narrow(q, q + shape.head_dim);
        const bool wide = shape.activation == DType::kFloat32;
        rotate(wide ? static_cast<void*>(q) : narrow.data(), row < 44 ? 256 + row : 299);
        for (size_t i = 0; !wide && i < narrow.size(); ++i) q[i] = static_cast<float>(narrow[i]);
      }
    }
    Run(rotated);
    Run(unrotated);
    for (int64_t row = 0; row < 45; ++row) ExpectSameRow(rotated, row, unrotated, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, AQueryWithoutKeysGivesZeroAndMinusInfinity) {
  AttentionBatch batch({}, 1, 128, 16);
  batch.FillContext(0, 128);
  batch.AddBlock(0, 100, 2, [](int64_t) { return SelectList(0, 1 << 20, {}); });
  Run(batch);
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(batch.out(0, 0)[i], 0.0f);
  EXPECT_EQ(batch.lse(1, 3), -kInfinity);
}

TEST_P(AttendTest, LargeLogitsNeitherOverflowNorLoseTheWinner) {
  AttentionBatch batch({.kv = DType::kBFloat16, .kv_heads = 1, .group = 1}, 1, 300, 17);
  batch.FillContext(0, 300);
  batch.AddBlock(0, 299, 1);
  // Logits of several thousand: one winner takes all.
  for (int64_t i = 0; i < 64; ++i) batch.q(0, 0)[i] *= 3000.0f;
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, KeysWithLogitMinusInfinityWeighNothing) {
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    AttentionBatch batch({.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1}, 1, 192,
                         24);
    batch.FillContext(0, 192);
    for (int64_t token = 0; token < 64; ++token) {  // the whole first page
      batch.kv().Set(batch.kv().Token(Side::kKey, 0, token, AttentionBatch::kLayer, 0), 0,
                     -kInfinity);
    }
    batch.AddBlock(0, 191, 1);
    batch.AddBlock(0, 63, 1);  // sees no other keys
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t head = 0; head < 2; ++head) batch.q(row, head)[0] = 1.0f;
    }
    Run(batch);
    EXPECT_EQ(batch.lse(1, 0), -kInfinity);
    EXPECT_EQ(batch.out(1, 1)[5], 0.0f);
    AttentionBatch without({.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1}, 1,
                           192, 24);
    without.FillContext(0, 192);
    without.AddBlock(0, 191, 1, [](int64_t) { return SelectList(0, 64, {}); });
    CopyQuery(batch, 0, without, 0);
    Run(without);
    ExpectSameRow(batch, 0, without, 0);
  }
}

// --- poison ---

// Unattended NaN does not reach the output, whether in a masked token of an attended page, in an
// unselected page, after the context, or in the future of an earlier row.
TEST_P(AttendTest, UnattendedNanDoesNotLeak) {
  for (const AttentionShape shape :
       {AttentionShape{.kv = DType::kFloat32}, AttentionShape{.kv = DType::kBFloat16},
        AttentionShape{.activation = DType::kBFloat16, .kv = DType::kBFloat16}}) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 1, 640, 18);
    batch.FillContext(0, 600);  // 600..639 stay NaN
    batch.AddBlock(0, 599, 1, [&](int64_t) { return ListWithHoles(599, batch.rng()); });
    for (int64_t token = 0; token < 599; ++token) {
      for (int64_t head = 0; head < 2; ++head) {
        if (Selected(batch.selection(0, head), token)) continue;
        for (const Side side : {Side::kKey, Side::kValue}) {
          std::byte* memory = batch.kv().Token(side, 0, token, AttentionBatch::kLayer, head);
          for (int64_t i = 0; i < 64; ++i) batch.kv().Set(memory, i, kNan);
        }
      }
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

TEST_P(AttendTest, NanInATokensKvReachesOnlyTheRowsThatSeeIt) {
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      for (const int64_t poisoned : {40, 41}) {  // the first and the second of a pair
        AttentionBatch batch(
            {.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1, .group = 2}, 1, 192,
            19);
        batch.FillContext(0, 192);
        batch.kv().Set(batch.kv().Token(side, 0, 128 + poisoned, AttentionBatch::kLayer, 0), 5,
                       kNan);
        batch.AddBlock(0, 128, 64);
        Run(batch);
        for (int64_t row = 0; row < 64; ++row) {
          for (int64_t head = 0; head < 2; ++head) {
            EXPECT_EQ(std::isnan(batch.out(row, head)[5]), row >= poisoned) << "row " << row;
          }
        }
      }
    }
  }
}

TEST_P(AttendTest, NanInAQueryStaysInItsRowAndIsSeen) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    AttentionBatch batch({.kv = kv, .kv_heads = 1, .group = 2}, 1, 2200, 20);
    batch.FillContext(0, 2200);
    batch.AddBlock(0, 2112, 64);
    batch.q(7, 1)[0] = kNan;
    Run(batch);
    for (int64_t row = 0; row < 64; ++row) {
      for (int64_t head = 0; head < 2; ++head) {
        const bool poisoned = row == 7 && head == 1;
        EXPECT_EQ(std::isnan(batch.out(row, head)[0]), poisoned);
        EXPECT_EQ(std::isnan(batch.out(row, head)[63]), poisoned);
        EXPECT_EQ(std::isnan(batch.lse(row, head)), poisoned);
      }
    }
  }
}

// --- pages ---

TEST_P(AttendTest, AbsentPagesSetTheFaultOfTheirSlotOnly) {
  AttentionBatch batch({}, 3, 2304, 21);
  for (int64_t slot = 0; slot < 3; ++slot) {
    batch.FillContext(slot, 2304);
    batch.AddBlock(slot, 2303, 1, [&](int64_t) { return SelectList(0, 2300, {Whole(3)}); });
  }
  batch.kv().SetTier(1, 3, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  batch.kv().SetTier(2, 4, AttentionBatch::kLayer, 0, PageTier::kAbsent);  // not selected
  Run(batch);
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
  EXPECT_EQ(batch.fault(2), 0);
}

TEST_P(AttendTest, ABlockThatTheSlotDoesNotHaveIsAbsent) {
  AttentionBatch batch({}, 2, 256, 22);
  batch.FillContext(0, 256);
  batch.FillContext(1, 64);
  batch.AddBlock(1, 200, 1);
  Run(batch);
  EXPECT_EQ(batch.fault(1), 1);
}

TEST_P(AttendTest, ReadsAreRecordedWithTheBytesAttendedTo) {
  AttentionBatch batch({.kv = DType::kBFloat16}, 1, 512, 23);
  batch.FillContext(0, 512);
  batch.AddBlock(0, 500, 1, [](int64_t) {
    return SelectList(0, 448, {{.page = 2, .chosen = kWholePage, .live = 0b10110}, Whole(3)});
  });
  for (const int64_t block : {2, 3, 4, 7}) {
    batch.kv().SetTier(0, block, AttentionBatch::kLayer, 1, PageTier::kHost);
  }
  Run(batch);
  const auto missed = [&](int64_t block, int64_t head) {
    return batch.kv().missed_bytes(0, block, AttentionBatch::kLayer, head);
  };
  constexpr uint32_t kTokenBytes = 2 * 64 * 2;
  EXPECT_EQ(missed(2, 1), 3 * kTokenBytes);
  EXPECT_EQ(missed(3, 1), 64 * kTokenBytes);
  EXPECT_EQ(missed(4, 1), 0u) << "not selected";
  EXPECT_EQ(missed(7, 1), 53 * kTokenBytes) << "up to position 500";
  EXPECT_EQ(missed(3, 0), 0u) << "in the device tier";
  for (int64_t block = 0; block < 8; ++block) {
    const bool selected = block == 2 || block == 3 || block == 7;
    for (const int64_t head : {0, 1}) {
      EXPECT_EQ(batch.kv().last_touched(0, block, AttentionBatch::kLayer, head),
                selected ? 1u : 0u);
      EXPECT_EQ(batch.kv().last_touched(0, block, 0, head), 0u) << "other layer";
    }
  }
}

// --- bitwise invariants ---

std::vector<AttentionShape> InvariantShapes() {
  std::vector<AttentionShape> shapes;
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
      for (const auto& [head_dim, group] :
           std::vector<std::pair<int64_t, int64_t>>{{64, 1}, {64, 7}, {128, 3}}) {
        shapes.push_back({.activation = activation,
                          .kv = kv,
                          .head_dim = head_dim,
                          .kv_heads = 1,
                          .group = group});
      }
    }
  }
  return shapes;
}

TEST_P(AttendTest, ADecodeRowHasTheBitsOfTheSameRowInAPrefillBlock) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    constexpr uint64_t kSeed = 31;
    AttentionBatch prefill(shape, 1, 2304, kSeed);
    AttentionBatch decode(shape, 1, 2304, kSeed);
    prefill.FillContext(0, 2304);
    decode.FillContext(0, 2304);
    prefill.AddBlock(0, 2176, 64);
    for (int64_t row = 0; row < 64; ++row) decode.AddBlock(0, 2176 + row, 1);
    for (int64_t row = 0; row < 64; ++row) CopyQuery(prefill, row, decode, row);
    Run(prefill);
    Run(decode);
    for (int64_t row = 0; row < 64; ++row) ExpectSameRow(prefill, row, decode, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, AtGroupedPositionsARowHasItsBitsInAnyBlock) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    for (const GroupedPositions& grouped : kGroupings) {
      SCOPED_TRACE(testing::Message() << Describe(shape) << ", groups of " << grouped.group_size
                                      << " beyond " << grouped.window);
      AttentionBatch prefill(shape, 1, 448, 28), decode(shape, 1, 448, 28);
      for (AttentionBatch* batch : {&prefill, &decode}) {
        batch->UseGroupedPositions(grouped);
        batch->FillContext(0, 448);
      }
      prefill.AddBlock(0, 384, 64);
      for (int64_t row = 0; row < 64; ++row) decode.AddBlock(0, 384 + row, 1);
      for (int64_t row = 0; row < 64; ++row) CopyQuery(prefill, row, decode, row);
      Run(prefill);
      Run(decode);
      for (int64_t row = 0; row < 64; ++row) ExpectSameRow(prefill, row, decode, row);
      if (HasFailure()) return;
    }
  }
}

TEST_P(AttendTest, CuttingABlockDoesNotChangeItsRows) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch whole(shape, 1, 2304, 32);
    AttentionBatch cut(shape, 1, 2304, 32);
    whole.FillContext(0, 2304);
    cut.FillContext(0, 2304);
    if (shape.group == 7) {  // both kinds of positions
      whole.UseCompactPositions();
      cut.UseCompactPositions();
    }
    const auto select = [](int64_t) { return SelectList(100, 2000, {Whole(3), Whole(20)}); };
    whole.AddBlock(0, 2240, 64, select);
    for (const auto& [begin, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 1}, {6, 33}, {39, 2}, {41, 23}}) {
      cut.AddBlock(0, 2240 + begin, rows, select);
    }
    for (int64_t row = 0; row < 64; ++row) CopyQuery(whole, row, cut, row);
    Run(whole);
    Run(cut);
    for (int64_t row = 0; row < 64; ++row) ExpectSameRow(whole, row, cut, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, NeighboursInTheBlockDoNotChangeARow) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 1, 512, 33);
    AttentionBatch other(shape, 1, 512, 33);
    batch.FillContext(0, 512);
    other.FillContext(0, 512);
    batch.AddBlock(0, 448, 64);
    other.AddBlock(0, 448, 64);
    for (int64_t row = 0; row < 64; ++row) {
      CopyQuery(batch, row, other, row);
      if (row % 4 == 1) continue;
      for (int64_t head = 0; head < other.heads(); ++head) other.q(row, head)[row % 64] = 1e30f;
    }
    Run(batch);
    Run(other);
    for (int64_t row = 1; row < 64; row += 4) ExpectSameRow(batch, row, other, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, AListOfEverythingHasTheBitsOfAll) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch all(shape, 1, 2304, 34);
    AttentionBatch list(shape, 1, 2304, 34);
    all.FillContext(0, 2304);
    list.FillContext(0, 2304);
    for (const auto& [first, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 64}, {2303, 1}, {2240, 64}, {2053, 7}}) {
      all.AddBlock(0, first, rows);
      list.AddBlock(0, first, rows, [&](int64_t) { return ListOfEverything(first); });
    }
    for (int64_t row = 0; row < all.num_tokens(); ++row) CopyQuery(all, row, list, row);
    Run(all);
    Run(list);
    for (int64_t row = 0; row < all.num_tokens(); ++row) ExpectSameRow(all, row, list, row);
    if (HasFailure()) return;
  }
}

// Runs items in a scrambled order and under changing thread numbers.
class ScrambledExecutor : public Executor {
 public:
  ScrambledExecutor(int threads, uint64_t seed) : threads_(threads), rng_(seed) {}
  void ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) override {
    largest_loop_ = std::max(largest_loop_, n);
    std::vector<int64_t> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), rng_);
    for (const int64_t i : order)
      body(i, static_cast<int>(rng_() % static_cast<uint64_t>(threads_)));
  }
  int num_threads() const override { return threads_; }
  int64_t largest_loop() const { return largest_loop_; }

 private:
  const int threads_;
  int64_t largest_loop_ = 0;
  std::mt19937_64 rng_;
};

TEST_P(AttendTest, ThreadsTiersAndBatchDoNotChangeARow) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.group != 7) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch alone(shape, 2, 4500, 35);
    AttentionBatch batched(shape, 2, 4500, 35);
    alone.FillContext(0, 4500);
    batched.FillContext(0, 4500);
    batched.FillContext(1, 300);
    alone.AddBlock(0, 4499, 1);
    batched.AddBlock(1, 256, 40);
    batched.AddBlock(0, 4499, 1);
    batched.AddBlock(1, 299, 1);
    CopyQuery(alone, 0, batched, 40);
    for (int64_t block = 0; block < 70; block += 3) {
      batched.kv().SetTier(0, block, AttentionBatch::kLayer, 0, PageTier::kHost);
    }
    Run(alone);
    for (const int threads : {1, 2, 3, 16}) {
      ScrambledExecutor executor(threads, 36);
      batched.Run(GetParam().run, executor);
      ExpectSameRow(alone, 0, batched, 40);
    }
    if (HasFailure()) return;
  }
}

// Long rows are cut into segments when threads would idle. Lists are, too: their segments may hold
// only the first page, only the last page, or none.
TEST_P(AttendTest, CuttingALongListIntoSegmentsDoesNotChangeIt) {
  AttentionBatch whole({.kv_heads = 1, .group = 2}, 1, 12000, 45);
  whole.FillContext(0, 12000);
  whole.AddBlock(0, 11999, 1, [](int64_t) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 0; page <= 31; ++page) entries.push_back(Whole(page));
    entries.push_back(Whole(32));   // the first page of segment 2, alone
    entries.push_back(Whole(127));  // the last page of segment 4, alone; segment 3 is empty
    for (int64_t page = 130; page < 180; ++page) entries.push_back(Whole(page));
    return SelectList(0, 11900, std::move(entries));
  });
  Run(whole);
  ExpectMatchesOracle(whole);
  AttentionBatch serial({.kv_heads = 1, .group = 2}, 1, 64, 45);
  serial.CopyResults(whole);
  ScrambledExecutor executor(3, 46);
  whole.Run(GetParam().run, executor);
  ExpectSameRow(serial, 0, whole, 0);
  if (GetParam().name != "Reference") {
    EXPECT_EQ(executor.largest_loop(), 6) << "segments 0, 1, 2, 4, 5, 6";
  }
}

TEST_P(AttendTest, RealThreadsGiveTheSameBits) {
  const AttentionShape shape = {.kv = DType::kBFloat16, .kv_heads = 2, .group = 2};
  AttentionBatch batch(shape, 3, 4500, 37);
  batch.FillContext(0, 4500);
  batch.FillContext(1, 700);
  batch.AddBlock(0, 4499, 1);
  batch.AddBlock(1, 640, 60);
  batch.AddBlock(1, 699, 1, [](int64_t) { return SelectList(64, 600, {Whole(3)}); });
  batch.AddBlock(2, 10, 1);  // a slot without blocks: faults from several threads
  batch.AddBlock(2, 11, 1);
  Run(batch);
  AttentionBatch serial(shape, 3, 4500, 37);
  serial.CopyResults(batch);
  ThreadExecutor executor(4);
  for (int repetition = 0; repetition < 3; ++repetition) {
    batch.Run(GetParam().run, executor);
    for (int64_t row = 0; row < 62; ++row) ExpectSameRow(serial, row, batch, row);
    EXPECT_EQ(batch.fault(2), 1);
  }
}

// The vector exp, seen from outside: two keys with logits 0 and -x and values 0 and 1 give out =
// exp(-x) / (1 + exp(-x)).
TEST_P(AttendTest, ExpIsAccurateDownToTheSmallestFloats) {
  double worst = 0;
  AttentionBatch batch({.kv_heads = 1, .group = 1}, 1, 64, 38);
  batch.FillContext(0, 2);
  for (int64_t i = 0; i < 64; ++i) {
    batch.kv().Set(batch.kv().Token(Side::kKey, 0, 0, AttentionBatch::kLayer, 0), i, 0.0f);
    batch.kv().Set(batch.kv().Token(Side::kKey, 0, 1, AttentionBatch::kLayer, 0), i,
                   i == 0 ? -8.0f : 0.0f);  // times the scale: -1
    batch.kv().Set(batch.kv().Token(Side::kValue, 0, 0, AttentionBatch::kLayer, 0), i, 0.0f);
    batch.kv().Set(batch.kv().Token(Side::kValue, 0, 1, AttentionBatch::kLayer, 0), i, 1.0f);
  }
  std::vector<float> xs = {0.0f, 1e-6f, 0.3465f, 0.34658f, 86.9f, 87.2f, 103.0f, 105.0f, 1e4f};
  for (float x = 0; x < 87; x += 0.0371f) xs.push_back(x);
  for (size_t i = 0; i < xs.size(); ++i) batch.AddBlock(0, 1, 1);
  for (size_t i = 0; i < xs.size(); ++i) batch.q(static_cast<int64_t>(i), 0)[0] = xs[i];
  Run(batch);
  for (size_t i = 0; i < xs.size(); ++i) {
    const double weight = std::exp(-double{xs[i]});
    const double expected = weight / (1 + weight);
    const double found = batch.out(static_cast<int64_t>(i), 0)[0];
    if (expected < 1.2e-38) {
      EXPECT_NEAR(found, expected, 1.5e-45) << "denormal, x = " << xs[i];
    } else {
      worst = std::max(worst, std::abs(found - expected) / expected);
    }
  }
  EXPECT_LT(worst, 3e-7) << "2 ulp of exp, and the rounding of the sum and the division";
}

TEST_P(AttendTest, TheSecondCallNeedsNoMoreScratch) {
  AttentionBatch batch({}, 1, 4500, 39);
  batch.FillContext(0, 4500);
  batch.AddBlock(0, 4499, 1);
  batch.AddBlock(0, 4416, 64);
  ScrambledExecutor executor(3, 40);
  batch.Run(GetParam().run, executor);
  const int64_t bytes = batch.scratch_bytes();
  batch.Run(GetParam().run, executor);
  EXPECT_EQ(batch.scratch_bytes(), bytes);
}

// --- Attend itself ---

TEST(Attend, MatchesTheOracleWithWhateverImplementationItChooses) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 2, 200, 41);
    batch.FillContext(0, 192);
    batch.FillContext(1, 200);
    batch.AddBlock(0, 128, 64);
    batch.AddBlock(1, 199, 1);
    batch.Run([](const AttendParams& p, Executor& e) { ASSERT_TRUE(Attend(p, e).ok()); });
    ExpectMatchesOracle(batch);
  }
}

// Chains of products and the order of sums are the same for vectors of any width. All forms that
// multiply floats give the same bits, so a machine with only AVX2 answers like one with AVX-512.
TEST(Attend, InstructionSetsGiveTheSameBits) {
  for (const int64_t head_dim : {64, 128}) {
    const AttentionShape shape = {.kv = DType::kBFloat16, .head_dim = head_dim, .group = 3};
    AttentionBatch batch(shape, 2, 2300, 51);
    batch.FillContext(0, 2300);
    batch.FillContext(1, 300);
    batch.AddBlock(0, 2299, 1);
    batch.AddBlock(1, 200, 70);  // pages that some queries see only in part
    batch.AddBlock(0, 2200, 1, [](int64_t) {
      return SelectList(64, 2100, {{.page = 5, .chosen = 0x10f0, .live = 0x10f0}, Whole(9)});
    });
    std::optional<AttentionBatch> first;
    SerialExecutor executor;
    for (const AttendImplementation& form : AttendImplementations()) {
      if (form.name == "Reference" || form.name == CpuIsaName(CpuIsa::kAvx512Bf16)) continue;
      batch.Run(form.run, executor);
      if (!first.has_value()) {
        first.emplace(shape, 2, 64, 51);
        first->CopyResults(batch);
        continue;
      }
      SCOPED_TRACE(form.name);
      for (int64_t row = 0; row < 72; ++row) ExpectSameRow(*first, row, batch, row);
    }
  }
}

TEST(Attend, AnEmptyBatchIsFine) {
  AttentionBatch batch({}, 1, 64, 42);
  batch.Run([](const AttendParams& p, Executor& e) { EXPECT_TRUE(Attend(p, e).ok()); });
}

TEST(Attend, LseMayBeLeftOut) {
  AttentionBatch batch({}, 1, 64, 43);
  batch.FillContext(0, 64);
  batch.AddBlock(0, 0, 64);
  batch.Run([](AttendParams p, Executor& e) {
    p.lse = TensorView();
    EXPECT_TRUE(Attend(p, e).ok());
  });
  EXPECT_TRUE(std::isnan(batch.lse(0, 0)));
  EXPECT_FALSE(std::isnan(batch.out(0, 0)[0]));
}

TEST(Attend, RejectsWhatDoesNotFit) {
  AttentionBatch batch({}, 1, 128, 44);
  batch.FillContext(0, 128);
  batch.AddBlock(0, 64, 64);
  const auto code = [&](auto change) {
    absl::StatusCode found;
    batch.Run([&](AttendParams p, Executor& e) {
      change(p);
      found = Attend(p, e).code();
    });
    return found;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](AttendParams&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(code([](AttendParams& p) { p.layer = 2; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.layer = -1; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.scratch = nullptr; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.selection.num_rows = 1; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.faults = {}; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.head_dim = 32; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.num_kv_heads = 3; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.dtype = DType::kFloat16; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) {
              p.out = TensorView(p.out.data(), DType::kBFloat16, {64, 4, 64});
            }),
            kInvalid);
  QueryBlock block = batch.blocks()[0];
  block.first_position = 65;
  EXPECT_EQ(code([&](AttendParams& p) { p.blocks = {&block, 1}; }), kInvalid);
}

}  // namespace
}  // namespace kvasir::kernels
