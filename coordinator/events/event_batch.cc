#include "coordinator/events/event_batch.h"

#define MSGPACK_NO_BOOST
#include "msgpack.hpp"

namespace kvasir::coordinator {
namespace {

constexpr char kMedium[] = "CPU";

// Appends to a string; msgpack::packer asks for this interface.
class StringSink {
 public:
  explicit StringSink(std::string& out) : out_(out) {}
  void write(const char* data, size_t size) { out_.append(data, size); }

 private:
  std::string& out_;
};

using Packer = msgpack::packer<StringSink>;

}  // namespace

uint64_t EventHash(const kvstore::PrefixHash& hash) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(number); ++i) {
    number = number << 8 | static_cast<uint8_t>(hash[i]);
  }
  return number;
}

void EventBatch::AddStored(const kvstore::PrefixHash& hash, const kvstore::PrefixHash* parent,
                           absl::Span<const int32_t> tokens) {
  StringSink sink(encoded_);
  Packer packer(sink);
  packer.pack_array(7);
  packer.pack("BlockStored");
  packer.pack_array(1);
  packer.pack(EventHash(hash));
  if (parent == nullptr) {
    packer.pack_nil();
  } else {
    packer.pack(EventHash(*parent));
  }
  packer.pack_array(static_cast<uint32_t>(tokens.size()));
  for (const int32_t token : tokens) packer.pack(token);
  packer.pack(kvstore::kBlockTokens);
  packer.pack_nil();
  packer.pack(kMedium);
  ++events_;
}

void EventBatch::AddRemoved(const kvstore::PrefixHash& hash) {
  StringSink sink(encoded_);
  Packer packer(sink);
  packer.pack_array(3);
  packer.pack("BlockRemoved");
  packer.pack_array(1);
  packer.pack(EventHash(hash));
  packer.pack(kMedium);
  ++events_;
}

void EventBatch::AddCleared() {
  StringSink sink(encoded_);
  Packer packer(sink);
  packer.pack_array(1);
  packer.pack("AllBlocksCleared");
  ++events_;
}

std::string EventBatch::Encode(double seconds_since_epoch) const {
  std::string text;
  StringSink sink(text);
  Packer packer(sink);
  packer.pack_array(3);
  packer.pack(seconds_since_epoch);
  packer.pack_array(events_);
  text += encoded_;
  packer.pack_nil();
  return text;
}

}  // namespace kvasir::coordinator
