// What the three stand-in libraries share: knobs, errors, counters, streams and events.
//
// A stream is a worker thread with a queue, so work that nobody waited for is really not there yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "acl/acl.h"

namespace sim {

// Codes that torch_npu understands and the vendor's public headers do not name.
constexpr aclError kBadDevice = 107001;
constexpr aclError kNoContext = 107002;
constexpr aclError kTimedOut = 107020;
constexpr aclError kUnsupported = 207000;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kTaskFailed = 507018;

long knob(const char* name, long otherwise);
std::string knob_text(const char* name, const char* otherwise);

// The message that aclGetRecentErrMsg gives back next; returns `code`.
aclError fail(aclError code, const std::string& message);

void count(const std::string& what, long by = 1);
int current_device();  // -1 if this thread has none
bool take_memory(int device, size_t bytes);  // false if the device does not have that much left
void give_memory(int device, size_t bytes);

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t asked = 0, done = 0;  // records enqueued, records that the stream has reached
  aclError error = ACL_SUCCESS;
  double at_ms = 0;

  aclError wait(uint64_t record, int timeout_ms);
};

class Stream {
 public:
  explicit Stream(int device);
  void enqueue(std::function<aclError()> task, bool even_after_failure = false);
  aclError synchronize(int timeout_ms);
  bool idle();
  aclError error();

  const int device;
  const int id;

 private:
  struct Task {
    std::function<aclError()> run;
    bool even_after_failure;
  };
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t unfinished_ = 0;
  bool started_ = false;
  aclError error_ = ACL_SUCCESS;
};

aclError synchronize_device(int device, int timeout_ms);
Stream* stream_of(aclrtStream handle);  // the handle's, or the current device's own for nullptr

}  // namespace sim
