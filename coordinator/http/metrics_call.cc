#include "coordinator/http/metrics_call.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace kvasir::coordinator {

using kernels::MutexLock;

void MetricsCall::Answer(std::shared_ptr<Exchange> exchange) {
  MutexLock lock(mu_);
  waiting_.emplace_back(text_.Ask(), std::move(exchange));
}

void MetricsCall::OnText() {
  std::vector<std::pair<std::shared_ptr<Exchange>, std::shared_ptr<const std::string>>> answered;
  {
    MutexLock lock(mu_);
    const auto rest = std::remove_if(waiting_.begin(), waiting_.end(), [&](auto& waiter) {
      std::shared_ptr<const std::string> text = text_.Get(waiter.first);
      if (text == nullptr) return false;
      answered.emplace_back(std::move(waiter.second), std::move(text));
      return true;
    });
    waiting_.erase(rest, waiting_.end());
  }
  for (const auto& [exchange, text] : answered) {
    exchange->Reply({.body = *text, .content_type = proto::MetricsText::kContentType});
  }
}

}  // namespace kvasir::coordinator
