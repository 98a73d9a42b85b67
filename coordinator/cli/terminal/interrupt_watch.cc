#include "coordinator/cli/terminal/interrupt_watch.h"

#include <pthread.h>
#include <utility>

namespace kvasir::coordinator {

InterruptWatch::InterruptWatch(std::function<void()> idle) : idle_(std::move(idle)) {
  sigemptyset(&interrupt_);
  sigaddset(&interrupt_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt_, &before_);
  thread_ = std::thread([this] { Run(); });
}

InterruptWatch::~InterruptWatch() {
  {
    kernels::MutexLock lock(mu_);
    ending_ = true;
  }
  pthread_kill(thread_.native_handle(), SIGINT);
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void InterruptWatch::SetCall(grpc::ClientContext* call) {
  kernels::MutexLock lock(mu_);
  call_ = call;
}

void InterruptWatch::Run() {
  while (true) {
    int signal = 0;
    sigwait(&interrupt_, &signal);
    bool idle = false;
    {
      kernels::MutexLock lock(mu_);
      if (ending_) return;
      idle = call_ == nullptr;
      if (!idle) call_->TryCancel();
    }
    if (idle) idle_();
  }
}

}  // namespace kvasir::coordinator
