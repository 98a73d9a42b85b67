// The GPU's ops against the CPU's, over odd sizes, unaligned rows, NaN and infinities.
#include "kernels/dense/dense_cuda.h"

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/executor.h"
#include "kernels/dense/add.h"
#include "kernels/rope/rope.h"
#include "tests/support/compare.h"
#include "tests/support/device_memory.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;
using tests::Tolerance;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

struct Shape {
  int64_t rows, dim;
};
const Shape kShapes[] = {{1, 1},   {1, 7},   {2, 8},     {3, 9},    {5, 16},   {4, 23},
                         {33, 64}, {9, 128}, {600, 256}, {3, 4096}, {2, 8193}, {1, 16384}};

class DenseCudaTest : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static int64_t Element() { return static_cast<int64_t>(DTypeSize(GetParam())); }
  // Copies the host's tensor to `shift` elements after an aligned address.
  TensorView OnDevice(TestTensor& tensor, int64_t shift = 0) {
    return memory_.Copy(tensor.view(), shift * Element()).value();
  }
  static TestTensor Poisoned(std::vector<int64_t> shape, DType dtype = GetParam()) {
    TestTensor tensor(dtype, std::move(shape));
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, kNan);
    return tensor;
  }

  static bool SameBytes(TestTensor& a, TestTensor& b) {
    return std::memcmp(a.view().data(), b.view().data(),
                       static_cast<size_t>(a.size() * Element())) == 0;
  }

  DeviceMemory memory_;
  SerialExecutor executor_;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, DenseCudaTest, testing::Values(kF32, kBf16),
                         [](const auto& param) {
                           return std::string(DTypeName(param.param).data());
                         });

TEST_P(DenseCudaTest, NormAgreesWithTheCpuForAllShapes) {
  for (const Shape& s : kShapes) {
    for (const int64_t shift : {0, 1}) {
      SCOPED_TRACE(testing::Message() << s.rows << " x " << s.dim << " shifted by " << shift);
      TestTensor x(GetParam(), {s.rows, s.dim}), weight(GetParam(), {s.dim});
      x.Fill(1);
      weight.Fill(3);
      if (s.rows > 2) {
        x.Set(s.dim, kNan);
        x.Set(2 * s.dim + s.dim / 2, kInf);
      }
      TestTensor y = Poisoned({s.rows, s.dim}), found = Poisoned({s.rows, s.dim});
      const TensorView device_y = OnDevice(found, shift);
      ASSERT_TRUE(RmsNorm({.x = OnDevice(x, shift),
                           .weight = OnDevice(weight, shift),
                           .y = device_y,
                           .epsilon = 1e-5f},
                          nullptr)
                      .ok());
      ASSERT_TRUE(RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 1e-5f},
                          executor_)
                      .ok());
      ASSERT_TRUE(DeviceMemory::Fetch(device_y, found.view()).ok());
      EXPECT_TRUE(AllClose(found.Values(), y.Values(),
                           {.relative = GetParam() == kF32 ? 2e-6 : 1.0 / 64}, y.shape()));
    }
  }
}

TEST_P(DenseCudaTest, ARowIsNormalizedAloneAsAmongOthersAndInPlace) {
  TestTensor x(GetParam(), {17, 4100}), weight(GetParam(), {4100});
  x.Fill(4);
  weight.Fill(5);
  const TensorView all = OnDevice(x), device_weight = OnDevice(weight);
  ASSERT_TRUE(
      RmsNorm({.x = all, .weight = device_weight, .y = all, .epsilon = 1e-6f}, nullptr).ok());
  TestTensor row(GetParam(), {1, 4100}), whole(GetParam(), {17, 4100});
  for (int64_t i = 0; i < 4100; ++i) row.Set(i, x.Get(13 * 4100 + i));
  const TensorView alone = OnDevice(row);
  ASSERT_TRUE(
      RmsNorm({.x = alone, .weight = device_weight, .y = alone, .epsilon = 1e-6f}, nullptr).ok());
  ASSERT_TRUE(DeviceMemory::Fetch(all, whole.view()).ok());
  ASSERT_TRUE(DeviceMemory::Fetch(alone, row.view()).ok());
  for (int64_t i = 0; i < 4100; ++i) ASSERT_EQ(row.Get(i), whole.Get(13 * 4100 + i)) << i;
}

// The sum's bits are the CPU's, the norm's those of a launch of its own.
TEST_P(DenseCudaTest, ASumAndItsNormHaveTheBitsOfTheirParts) {
  for (const Shape& s : kShapes) {
    for (const int64_t shift : {0, 1}) {
      SCOPED_TRACE(testing::Message() << s.rows << " x " << s.dim << " shifted by " << shift);
      TestTensor x(GetParam(), {s.rows, s.dim}), y(GetParam(), {s.rows, s.dim});
      TestTensor weight(GetParam(), {s.dim}), found(GetParam(), {s.rows, s.dim});
      TestTensor poison = Poisoned({s.rows, s.dim}), norm = Poisoned({s.rows, s.dim});
      x.Fill(1);
      y.Fill(2);
      weight.Fill(3);
      if (s.rows > 2) x.Set(s.dim, kInf);
      const TensorView added = OnDevice(x, shift), factors = OnDevice(weight, shift);
      const TensorView sum = OnDevice(y, shift), plain = OnDevice(y, shift);
      const TensorView normed = OnDevice(poison, shift), apart = OnDevice(poison, shift);
      ASSERT_TRUE(
          AddNorm({.x = added, .y = sum, .weight = factors, .epsilon = 1e-5f, .normed = normed},
                  nullptr)
              .ok());
      ASSERT_TRUE(AddNorm({.x = added, .y = plain}, nullptr).ok());
      ASSERT_TRUE(
          RmsNorm({.x = sum, .weight = factors, .y = apart, .epsilon = 1e-5f}, nullptr).ok());
      ASSERT_TRUE(AddTo(x.view(), y.view(), executor_).ok());
      for (const TensorView& of_two : {sum, plain}) {
        ASSERT_TRUE(DeviceMemory::Fetch(of_two, found.view()).ok());
        EXPECT_TRUE(SameBytes(found, y));
      }
      ASSERT_TRUE(DeviceMemory::Fetch(normed, found.view()).ok());
      ASSERT_TRUE(DeviceMemory::Fetch(apart, norm.view()).ok());
      EXPECT_TRUE(SameBytes(found, norm));
    }
  }
}

TEST_P(DenseCudaTest, SiluMulAgreesWithTheCpuForAllShapes) {
  for (const Shape& s : kShapes) {
    for (const int64_t shift : {0, 1}) {
      SCOPED_TRACE(testing::Message() << s.rows << " x " << s.dim << " shifted by " << shift);
      TestTensor gate_up(GetParam(), {s.rows, 2 * s.dim});
      gate_up.Fill(6);
      const float hostile[] = {kNan, kInf, -kInf, -1000.0f, -90.0f, 1000.0f, 0.0f};
      for (int64_t i = 0; i < std::ssize(hostile) && i < s.dim; ++i) {
        gate_up.Set(i, hostile[static_cast<size_t>(i)]);
      }
      TestTensor y = Poisoned({s.rows, s.dim}), found = Poisoned({s.rows, s.dim});
      const TensorView device_y = OnDevice(found, shift);
      ASSERT_TRUE(SiluMul({.gate_up = OnDevice(gate_up, shift), .y = device_y}, nullptr).ok());
      ASSERT_TRUE(SiluMul({.gate_up = gate_up.view(), .y = y.view()}, executor_).ok());
      ASSERT_TRUE(DeviceMemory::Fetch(device_y, found.view()).ok());
      const Tolerance tolerance = {.absolute = 1e-30,
                                   .relative = GetParam() == kF32 ? 1e-5 : 1.0 / 64};
      EXPECT_TRUE(AllClose(found.Values(), y.Values(), tolerance, y.shape()));
    }
  }
}

// Slices of every alignment, and more elements than the launch has threads.
TEST_P(DenseCudaTest, RandomNumbersHaveTheCpusBits) {
  for (const Shape& s : {Shape{1, 1}, Shape{3, 9}, Shape{600, 256}, Shape{5, 230000}}) {
    SCOPED_TRACE(testing::Message() << s.rows << " x " << s.dim);
    TestTensor y = Poisoned({s.rows, s.dim}), found = Poisoned({s.rows, s.dim});
    RandomFillParams params = {.y = y.view(),
                               .seed = 11,
                               .mean = 0.25,
                               .spread = 1.75,
                               .first_row = 3,
                               .first_col = 2,
                               .width = s.dim + 5};
    ASSERT_TRUE(FillRandom(params, executor_).ok());
    params.y = OnDevice(found, 1);
    ASSERT_TRUE(FillRandom(params, nullptr).ok());
    ASSERT_TRUE(DeviceMemory::Fetch(params.y, found.view()).ok());
    EXPECT_EQ(found.Values(), y.Values());
  }
}

TEST_P(DenseCudaTest, RopeAnglesAreTheCpusButForTheLastBit) {
  const std::vector<int64_t> positions = {0, 1, 63, 64, 4095, 131071, 3'000'000, 1'000'000'007};
  const int64_t tokens = std::ssize(positions);
  for (const int64_t half_dim : {1, 3, 32, 64}) {
    SCOPED_TRACE(testing::Message() << half_dim << " pairs");
    std::vector<double> inv_freq;
    for (int64_t i = 0; i < half_dim; ++i) {
      inv_freq.push_back(std::pow(5e5, -2.0 * static_cast<double>(i) / 128.0));
    }
    RopeTable table(inv_freq, 1.25);
    table.SetPositions(positions, executor_);
    TestTensor cosines = Poisoned({tokens, half_dim}, kF32);
    TestTensor sines = Poisoned({tokens, half_dim}, kF32);
    const RopeAngles computed = {.cos = memory_.Copy(cosines.view()).value(),
                                 .sin = memory_.Copy(sines.view()).value()};
    const auto* at = memory_.Copy(positions.data(), positions.size()).value();
    const auto* frequencies = memory_.Copy(inv_freq.data(), inv_freq.size()).value();
    ASSERT_TRUE(ComputeRopeAngles({.positions = {at, positions.size()},
                                   .inv_freq = {frequencies, inv_freq.size()},
                                   .attention_scaling = 1.25,
                                   .angles = computed},
                                  nullptr)
                    .ok());
    ASSERT_TRUE(DeviceMemory::Fetch(computed.cos, cosines.view()).ok());
    ASSERT_TRUE(DeviceMemory::Fetch(computed.sin, sines.view()).ok());
    const auto size = static_cast<size_t>(tokens * half_dim);
    // One unit in the last place of a float32.
    const Tolerance last_bit = {.absolute = 1e-15, .relative = 1.2e-7};
    EXPECT_TRUE(AllClose(cosines.Values(), std::vector<float>(table.cos(), table.cos() + size),
                         last_bit, cosines.shape()));
    EXPECT_TRUE(AllClose(sines.Values(), std::vector<float>(table.sin(), table.sin() + size),
                         last_bit, sines.shape()));
  }
}

TEST_P(DenseCudaTest, EmbeddingGathersRowsAndPoisonsThoseThatAreNotThere) {
  for (const Shape& s : kShapes) {
    for (const int64_t shift : {0, 1}) {
      SCOPED_TRACE(testing::Message() << s.rows << " x " << s.dim << " shifted by " << shift);
      TestTensor table(GetParam(), {s.rows, s.dim});
      table.Fill(8);
      const auto last = static_cast<int32_t>(s.rows - 1);
      std::vector<int32_t> ids = {last, 0, -1, last / 2, last + 1, last};
      TestTensor found = Poisoned({std::ssize(ids), s.dim});
      const TensorView y = OnDevice(found, shift);
      ASSERT_TRUE(
          Embedding(
              {.table = OnDevice(table, shift),
               .ids =
                   memory_.Copy(TensorView(ids.data(), DType::kInt32, {std::ssize(ids)})).value(),
               .y = y},
              nullptr)
              .ok());
      ASSERT_TRUE(DeviceMemory::Fetch(y, found.view()).ok());
      for (int64_t t = 0; t < std::ssize(ids); ++t) {
        const int32_t id = ids[static_cast<size_t>(t)];
        for (int64_t i = 0; i < s.dim; ++i) {
          if (id < 0 || id > last) {
            ASSERT_TRUE(std::isnan(found.Get(t * s.dim + i)));
          } else {
            ASSERT_EQ(found.Get(t * s.dim + i), table.Get(id * s.dim + i));
          }
        }
      }
    }
  }
}

TEST_P(DenseCudaTest, NothingToDoIsDone) {
  TestTensor none(GetParam(), {0, 64}), weight(GetParam(), {64}), gate_up(GetParam(), {0, 128});
  const TensorView y = OnDevice(none);
  EXPECT_TRUE(RmsNorm({.x = y, .weight = OnDevice(weight), .y = y}, nullptr).ok());
  EXPECT_TRUE(SiluMul({.gate_up = OnDevice(gate_up), .y = y}, nullptr).ok());
  EXPECT_TRUE(AddNorm({.x = y, .y = y}, nullptr).ok());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_P(DenseCudaTest, HostMemoryIsRefused) {
  TestTensor x(GetParam(), {2, 64}), weight(GetParam(), {64}), gate_up(GetParam(), {2, 128});
  const TensorView y = OnDevice(x);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(RmsNorm({.x = x.view(), .weight = OnDevice(weight), .y = y}, nullptr).code(), kInvalid);
  EXPECT_EQ(SiluMul({.gate_up = gate_up.view(), .y = y}, nullptr).code(), kInvalid);
  EXPECT_EQ(AddNorm({.x = x.view(), .y = y}, nullptr).code(), kInvalid);
  EXPECT_EQ(SiluMul({.gate_up = OnDevice(gate_up), .y = y}, executor_).code(),
            absl::StatusCode::kUnimplemented);
}

TEST_P(DenseCudaTest, FindsTheTokensThatAreNotFinite) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.dim);
    TestTensor x(GetParam(), {shape.rows, shape.dim});
    x.Fill(1);
    const float hostile[] = {kNan, kInf, -kInf};
    std::vector<uint8_t> expected(static_cast<size_t>(shape.rows), 1);
    for (int64_t row = 0; row < shape.rows; row += 2) {  // the last element
      x.Set((row + 1) * shape.dim - 1, hostile[row % 3]);
      expected[static_cast<size_t>(row)] = 0;
    }
    std::vector<uint8_t> found(static_cast<size_t>(shape.rows), 77);
    uint8_t* const device = memory_.Copy(found.data(), found.size()).value();
    const absl::Status status =
        FindFiniteTokens({.x = OnDevice(x, 1), .finite = {device, found.size()}}, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(DeviceMemory::Fetch(device, found.data(), found.size()).ok());
    EXPECT_EQ(found, expected);
  }
}

}  // namespace
}  // namespace kvasir::kernels
