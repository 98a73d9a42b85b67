// Memory that request bodies may take while they arrive, over all connections of a server. The
// first kFreeBytes of each body are not counted, so that large bodies cannot keep small ones out.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>

namespace kvasir::coordinator {

class BodyBudget {
 public:
  static constexpr size_t kFreeBytes = size_t{64} << 10;

  explicit BodyBudget(size_t most_bytes) : left_(static_cast<int64_t>(most_bytes)) {}

  // A body's share of the budget, given back with this object.
  class Share {
   public:
    explicit Share(BodyBudget& budget) : budget_(budget) {}
    ~Share() { budget_.left_ += taken_; }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // Makes room for a body of `bytes`. Returns false, and changes nothing, when there is none.
    bool GrowTo(size_t bytes) {
      const int64_t counted = bytes <= kFreeBytes ? 0 : static_cast<int64_t>(bytes - kFreeBytes);
      const int64_t more = counted - taken_;
      if (more <= 0) return true;
      if (budget_.left_.fetch_sub(more) < more) {
        budget_.left_ += more;
        return false;
      }
      taken_ = counted;
      return true;
    }

   private:
    BodyBudget& budget_;
    int64_t taken_ = 0;
  };

 private:
  std::atomic<int64_t> left_;
};

}  // namespace kvasir::coordinator
