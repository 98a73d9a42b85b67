// The coordinator's part in a rendezvous, for tests of groups in one process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "worker/parallel/rendezvous.h"

namespace kvasir::worker {

// Delivers every entry that a rank puts to all the others, as the coordinator does.
class Relay {
 public:
  explicit Relay(int size) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rendezvous>(
          [this, rank](const std::string& key, const std::string& value) {
            for (size_t other = 0; other < ranks_.size(); ++other) {
              if (static_cast<int>(other) != rank) ranks_[other]->Deliver(key, value);
            }
          }));
    }
  }
  Rendezvous& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }

 private:
  std::vector<std::unique_ptr<Rendezvous>> ranks_;
};

}  // namespace kvasir::worker
