#include "proto/metrics_text.h"

#include <utility>

#include "prometheus/text_serializer.h"

#include "proto/process/named_thread.h"

namespace kvasir::proto {

using kernels::MutexLock;

MetricsText::MetricsText(const prometheus::Registry& registry, std::function<void()> on_done)
    : registry_(registry), on_done_(std::move(on_done)) {}

MetricsText::~MetricsText() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

int64_t MetricsText::Ask() {
  MutexLock lock(mu_);
  asked_ = begun_ + 1;
  if (!thread_.joinable()) thread_ = NamedThread("metrics-text", [this] { Run(); });
  changed_.NotifyAll();
  return asked_;
}

std::shared_ptr<const std::string> MetricsText::Get(int64_t number) {
  MutexLock lock(mu_);
  return written_ >= number ? text_ : nullptr;
}

void MetricsText::Run() {
  while (true) {
    {
      MutexLock lock(mu_);
      while (asked_ == begun_ && !stopping_) changed_.Wait(mu_);
      if (stopping_) return;
      ++begun_;
    }
    auto text = std::make_shared<const std::string>(
        prometheus::TextSerializer().Serialize(registry_.Collect()));
    {
      MutexLock lock(mu_);
      text_ = std::move(text);
      written_ = begun_;
    }
    on_done_();
  }
}

}  // namespace kvasir::proto
