// Blocks for tests of the tiers below the host: a small shard, extents with random content, and the
// disk store of a test with its faults and its clock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "spdlog/spdlog.h"

#include "kernels/base/buffer.h"
#include "kernels/paged/paged_kv.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/disk_tier.h"
#include "tests/support/faulty_file_io.h"

namespace kvasir::kvstore {

inline KvShard SmallShard() {
  return {.layout = {.num_layers = 2,
                     .num_kv_heads = 2,
                     .head_dim = 2,
                     .dtype = kernels::DType::kBFloat16},
          .weights_hash = std::string(32, 'w'),
          .kv_form = "rotated/bfloat16",
          .first_layer = 0,
          .first_head = 0};
}

// A block called `name`: its whole content follows from name and generation.
struct TestBlock {
  TestBlock(const ExtentFormat& format, uint32_t name, uint64_t generation,
            const PrefixHash& owner = {})
      : buffer(kernels::HostBuffer::Allocate(format.extent_bytes() + kExtentAlignment).value()) {
    std::byte* data = buffer.data();
    data += -reinterpret_cast<uintptr_t>(data) % kExtentAlignment;
    extent = {data, static_cast<size_t>(format.extent_bytes())};
    std::mt19937 rng(name * 7919 + static_cast<uint32_t>(generation));
    for (std::byte& byte : extent) byte = static_cast<std::byte>(rng());
    std::memcpy(identity.hash.data(), &name, sizeof(name));
    identity.generation = generation;
    identity.owner = owner;
    identity.tokens.fill(static_cast<int32_t>(name));
    const kernels::KvLayout& layout = format.shard().layout;
    for (int64_t i = 0; i < layout.pages_per_block(); ++i) {
      const uint64_t checksum = PageChecksum(
          format.identity(identity.hash, i),
          absl::Span<const std::byte>(extent).subspan(static_cast<size_t>(format.page_offset(i)),
                                                      static_cast<size_t>(layout.page_bytes())));
      std::memcpy(extent.data() + format.checksums_offset() + i * 8, &checksum, sizeof(checksum));
    }
    format.WriteHeader(identity, extent);
  }

  kernels::HostBuffer buffer;
  absl::Span<std::byte> extent;
  BlockIdentity identity;
};

inline PrefixHash HashOf(uint32_t name) {
  PrefixHash hash{};
  std::memcpy(hash.data(), &name, sizeof(name));
  return hash;
}

inline std::array<int32_t, kBlockTokens> TokensOf(uint32_t name) {
  std::array<int32_t, kBlockTokens> tokens;
  tokens.fill(static_cast<int32_t>(name));
  return tokens;
}

// Calls visit(byte, expected) for the bytes of pages and bounds of the block that is bound to slot
// 0, where `expected` follows from the name.
template <typename Visit>
void ForEachByte(const kernels::PagedKv& kv, uint32_t name, const Visit& visit) {
  const kernels::KvLayout& layout = kv.layout;
  std::mt19937 rng(name);
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
      std::byte* page = kv.Read(0, 0, layer, head, layout.page_bytes()).page();
      std::byte* bounds = kv.Bounds(0, 0, layer, head);
      for (int64_t i = 0; i < layout.page_bytes(); ++i) {
        visit(page[i], static_cast<std::byte>(rng()));
      }
      for (int64_t i = 0; i < layout.page_bounds_bytes(); ++i) {
        visit(bounds[i], static_cast<std::byte>(rng()));
      }
    }
  }
}

// A disk store that can be closed, damaged and opened again.
class TestStore {
 public:
  explicit TestStore(std::string directory, uint32_t seed = 1)
      : directory_(std::move(directory)), control(std::make_shared<FaultControl>(seed)) {
    // Hundreds of errors that are caused on purpose would hide what a failed test says.
    spdlog::set_level(spdlog::level::off);
  }

  DiskTierOptions Options(int64_t capacity_blocks) const {
    const int64_t extent = format.extent_bytes();
    DiskTierOptions options;
    options.directory = directory_;
    options.shard = SmallShard();
    options.capacity_bytes = capacity_blocks * extent;
    options.segment_bytes = 4 * extent;
    options.group_bytes = 3 * extent;
    options.io = std::make_unique<FaultyFileIo>(MakeFileIo(IoEngine::kIoUringOrThreads), control);
    options.now = [this] {
      return std::chrono::steady_clock::time_point(std::chrono::milliseconds(now_ms.load()));
    };
    return options;
  }
  absl::Status Open(int64_t capacity_blocks = 100) {
    Close();
    auto opened = OpenDiskTier(Options(capacity_blocks));
    if (!opened.ok()) return opened.status();
    tier = *std::move(opened);
    return absl::OkStatus();
  }
  void Close() { tier.reset(); }

  // Each waits for its completion.
  absl::Status Write(uint32_t name, uint64_t generation = 0, const PrefixHash& owner = {}) {
    const TestBlock block(format, name, generation == 0 ? tier->first_generation() : generation,
                          owner);
    tier->Write({{.ticket = ++ticket_, .block = block.identity, .extent = block.extent}});
    return Await(ticket_).status;
  }
  // Returns OK only when the bytes are those of the block that was written last.
  absl::Status Read(uint32_t name) {
    TestBlock found(format, name, 0);
    tier->Read({{.ticket = ++ticket_, .hash = HashOf(name), .extent = found.extent}});
    const TierCompletion completion = Await(ticket_);
    if (!completion.status.ok()) return completion.status;
    const TestBlock expected(format, name, completion.block.generation, completion.block.owner);
    if (std::memcmp(expected.extent.data(), found.extent.data(), found.extent.size()) != 0) {
      ADD_FAILURE() << "block " << name << " came back with other bytes";
    }
    return absl::OkStatus();
  }
  TierErased Erase(TierErase erase) {
    EXPECT_TRUE(tier->Erase(std::move(erase)));
    for (;;) {
      tier->Wait();
      const TierEvents events = tier->Poll();
      forgotten.insert(forgotten.end(), events.forgotten.begin(), events.forgotten.end());
      if (!events.erased.empty()) return events.erased[0];
    }
  }
  TierCompletion Await(uint64_t ticket) {
    for (;;) {
      tier->Wait();
      TierEvents events = tier->Poll();
      forgotten.insert(forgotten.end(), events.forgotten.begin(), events.forgotten.end());
      for (TierCompletion& completion : events.completions) {
        if (completion.ticket == ticket) return std::move(completion);
      }
    }
  }
  // Returns the names of the blocks that the tier reports to hold.
  std::vector<uint32_t> Names() const {
    std::vector<uint32_t> names;
    for (const StoredBlock& block : tier->Inventory()) {
      uint32_t name = 0;
      std::memcpy(&name, block.hash.data(), sizeof(name));
      EXPECT_EQ(block.tokens[63], static_cast<int32_t>(name));
      EXPECT_TRUE(tier->Holds(block.hash));
      names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  const ExtentFormat format = ExtentFormat::Create(SmallShard()).value();

 private:
  const std::string directory_;
  uint64_t ticket_ = 0;

 public:
  const std::shared_ptr<FaultControl> control;
  std::atomic<int64_t> now_ms = 1000000;
  std::vector<PrefixHash> forgotten;
  std::unique_ptr<Tier> tier;
};

}  // namespace kvasir::kvstore
