// Writes the text of a Prometheus registry on a thread of its own, once for everyone who asked
// since it began the previous one, so that threads that serve clients never wait for it. The thread
// starts when somebody asks. Used by the servers of /metrics. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "prometheus/registry.h"

#include "kernels/base/mutex.h"

namespace kvasir::proto {

class MetricsText {
 public:
  // Value of Content-Type.
  static constexpr char kContentType[] = "text/plain; version=0.0.4; charset=utf-8";

  // `registry` outlives this object. `on_done` is called on its thread after each text.
  MetricsText(const prometheus::Registry& registry, std::function<void()> on_done);
  ~MetricsText();

  // Returns the number of the text that answers this request.
  int64_t Ask() EXCLUDES(mu_);
  // Null until it is written.
  std::shared_ptr<const std::string> Get(int64_t number) EXCLUDES(mu_);

 private:
  void Run() EXCLUDES(mu_);

  const prometheus::Registry& registry_;
  const std::function<void()> on_done_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  int64_t asked_ GUARDED_BY(mu_) = 0;    // texts are numbered from 1
  int64_t begun_ GUARDED_BY(mu_) = 0;    // asked_, or one less
  int64_t written_ GUARDED_BY(mu_) = 0;  // begun_, or one less
  std::shared_ptr<const std::string> text_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  std::thread thread_ GUARDED_BY(mu_);  // last: it uses everything above
};

}  // namespace kvasir::proto
