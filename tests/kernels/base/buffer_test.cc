#include "kernels/base/buffer.h"

#include <gtest/gtest.h>
#include <limits>
#include <utility>

namespace kvasir::kernels {
namespace {

TEST(HostBuffer, IsAlignedZeroedAndWritableAtEverySize) {
  for (int64_t bytes : {1, 63, 64, 65, 4097, 1 << 20}) {
    auto buffer = HostBuffer::Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->size_bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % HostBuffer::kAlignment, 0u);
    uint8_t* data = buffer->As<uint8_t>();
    for (int64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(data[i], 0) << i;
      data[i] = 0xff;
    }
  }
}

TEST(HostBuffer, MovedFromIsEmpty) {
  auto buffer = HostBuffer::Allocate(100);
  ASSERT_TRUE(buffer.ok());
  const std::byte* data = buffer->data();
  HostBuffer moved = *std::move(buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(buffer->data(), nullptr);
  EXPECT_EQ(buffer->size_bytes(), 0);
  HostBuffer assigned;
  assigned = std::move(moved);
  EXPECT_EQ(assigned.data(), data);
  EXPECT_EQ(assigned.size_bytes(), 100);
  EXPECT_EQ(moved.data(), nullptr);
}

TEST(HostBuffer, ImpossibleSizesAreErrors) {
  EXPECT_EQ(HostBuffer::Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostBuffer::Allocate(std::numeric_limits<int64_t>::max()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(HostBuffer::Allocate(int64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
  const auto empty = HostBuffer::Allocate(0);
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->data(), nullptr);
}

}  // namespace
}  // namespace kvasir::kernels
