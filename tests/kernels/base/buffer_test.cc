#include "kernels/base/buffer.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

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

TEST(HostArena, PiecesShareABufferThatTheyKeep) {
  auto arena = std::make_unique<HostArena>(1 << 20);
  std::vector<HostArena::Piece> pieces;
  for (const int64_t bytes : {1000, 100, 1 << 19, 300'000, 400'000, 0}) {
    auto piece = arena->Take(bytes);
    ASSERT_TRUE(piece.ok()) << piece.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece->data) % HostBuffer::kAlignment, 0u);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(piece->data[i], std::byte{0}) << i;
    std::fill_n(piece->data, bytes, std::byte{1});
    pieces.push_back(*std::move(piece));
  }
  EXPECT_EQ(pieces[0].data + 1024, pieces[1].data);
  EXPECT_EQ(pieces[2].buffer, pieces[0].buffer);
  EXPECT_NE(pieces[4].buffer, pieces[0].buffer);  // the first was full
  arena.reset();
  EXPECT_EQ(pieces[3].data[299'999], std::byte{1});
}

TEST(HostArena, LargePiecesHaveBuffersOfTheirOwn) {
  HostArena arena(1 << 20);
  const auto small = arena.Take(10), large = arena.Take((1 << 19) + 1), next = arena.Take(10);
  ASSERT_TRUE(small.ok() && large.ok() && next.ok());
  EXPECT_NE(large->buffer, small->buffer);
  EXPECT_EQ(next->buffer, small->buffer);
  EXPECT_EQ(HostArena(0).Take(5)->buffer->size_bytes(), 5);
  EXPECT_EQ(arena.Take(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
