// Memory for parts of blocks: where it lies, who has it, and that it is used again.
#include "worker/peers/part_memory.h"

#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <vector>

#include "kvstore/format/page_format.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kBytes = (int64_t{1} << 20) + kvstore::kExtentAlignment;

using Part = std::shared_ptr<const PartMemory::Part>;

TEST(PartMemoryTest, PartsAreAlignedAndApart) {
  PartMemory memory;
  std::vector<Part> parts;
  for (int i = 0; i < 50; ++i) {
    parts.push_back(memory.Take(kBytes).value());
    const auto bytes = parts.back()->bytes();
    ASSERT_EQ(bytes.size(), static_cast<size_t>(kBytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % kvstore::kExtentAlignment, 0U);
    std::memset(bytes.data(), i, bytes.size());
  }
  for (int i = 0; i < 50; ++i) {
    for (const std::byte byte : parts[static_cast<size_t>(i)]->bytes()) {
      ASSERT_EQ(byte, static_cast<std::byte>(i));
    }
  }
}

TEST(PartMemoryTest, TheLastThatWasGivenBackIsTakenFirst) {
  PartMemory memory;
  std::vector<Part> parts;
  for (int i = 0; i < 3; ++i) parts.push_back(memory.Take(kBytes).value());
  const std::byte* const last = parts[1]->bytes().data();
  for (const size_t i : {size_t{0}, size_t{2}, size_t{1}}) parts[i].reset();
  EXPECT_NE(memory.Take(2 * kBytes).value()->bytes().data(), last);
  EXPECT_EQ(memory.Take(kBytes).value()->bytes().data(), last);
}

TEST(PartMemoryTest, APartOutlivesItsMemory) {
  std::optional<PartMemory> memory(std::in_place);
  const Part part = memory->Take(kBytes).value();
  memory.reset();
  std::memset(part->bytes().data(), 1, part->bytes().size());
}

}  // namespace
}  // namespace kvasir::worker
