// Knobs, errors, counters, streams and events of the simulated device.
#include "simulator.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

namespace sim {
namespace {

// Never destroyed: worker threads outlive the end of main.
struct Shared {
  std::mutex mutex;
  std::map<std::string, long> counters;
  std::string message;
  std::vector<Stream*> streams;
};

Shared& shared() {
  static Shared* one = new Shared;
  return *one;
}

std::string& own_message() {
  thread_local std::string text;
  return text;
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

long knob(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

std::string knob_text(const char* name, const char* otherwise) {
  const char* text = getenv(name);
  return text && *text ? text : otherwise;
}

aclError fail(aclError code, const std::string& message) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().message = message;
  return code;
}

void count(const std::string& what, long by) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().counters[what] += by;
}

aclError Event::wait(uint64_t record, int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex);
  auto reached = [&] { return done >= record; };
  if (timeout_ms < 0) changed.wait(lock, reached);
  else if (!changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), reached)) return kTimedOut;
  return error;
}

Stream::Stream(int device_index) : device(device_index), id([] { static std::atomic<int> next{0}; return next++; }()) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().streams.push_back(this);
}

void Stream::enqueue(std::function<aclError()> task, bool even_after_failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    std::thread([this] { work(); }).detach();
    started_ = true;
  }
  tasks_.push_back({std::move(task), even_after_failure});
  unfinished_++;
  changed_.notify_all();
}

void Stream::work() {
  aclrtSetDevice(device);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const bool skipped = error_ != ACL_SUCCESS && !task.even_after_failure;
    lock.unlock();
    const aclError result = skipped ? ACL_SUCCESS : task.run();
    task.run = nullptr;
    lock.lock();
    if (error_ == ACL_SUCCESS) error_ = result;
    unfinished_--;
    changed_.notify_all();
  }
}

aclError Stream::synchronize(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto empty = [&] { return unfinished_ == 0; };
  if (timeout_ms < 0) changed_.wait(lock, empty);
  else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), empty))
    return fail(kTimedOut, "the stream did not finish in time");
  return error_;
}

aclError synchronize_device(int device, int timeout_ms) {
  std::unique_lock<std::mutex> lock(shared().mutex);
  const std::vector<Stream*> streams = shared().streams;
  lock.unlock();
  aclError first = ACL_SUCCESS;
  for (Stream* stream : streams) {
    if (stream->device != device) continue;
    const aclError error = stream->synchronize(timeout_ms);
    if (first == ACL_SUCCESS) first = error;
  }
  return first;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

aclError Stream::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

}  // namespace sim

using sim::Event;
using EventHandle = std::shared_ptr<Event>;

static EventHandle& event_of(aclrtEvent handle) { return *static_cast<EventHandle*>(handle); }

extern "C" {

// For the tests, through ctypes: how often the simulated device was asked for `what`.
long simulated_count(const char* what) {
  std::lock_guard<std::mutex> lock(sim::shared().mutex);
  auto found = sim::shared().counters.find(what);
  return found == sim::shared().counters.end() ? 0 : found->second;
}

const char* aclGetRecentErrMsg() {
  std::lock_guard<std::mutex> lock(sim::shared().mutex);
  sim::own_message() = sim::shared().message;
  return sim::own_message().empty() ? nullptr : sim::own_message().c_str();
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new EventHandle(std::make_shared<Event>());
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<EventHandle*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  EventHandle event = event_of(handle);
  sim::Stream* stream = sim::stream_of(stream_handle);
  if (!stream) return sim::kNoContext;
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = ++event->asked;
  }
  stream->enqueue(
      [event, stream, record] {
        const aclError so_far = stream->error();
        std::lock_guard<std::mutex> lock(event->mutex);
        event->done = std::max(event->done, record);
        event->error = so_far;
        event->at_ms = sim::now_ms();
        event->changed.notify_all();
        return ACL_SUCCESS;
      },
      true);
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  EventHandle event = event_of(handle);
  sim::Stream* stream = sim::stream_of(stream_handle);
  if (!stream) return sim::kNoContext;
  std::unique_lock<std::mutex> lock(event->mutex);
  const uint64_t record = event->asked;
  lock.unlock();
  stream->enqueue([event, record] { return event->wait(record, -1); });
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  EventHandle event = event_of(handle);
  std::unique_lock<std::mutex> lock(event->mutex);
  const uint64_t record = event->asked;
  lock.unlock();
  return event->wait(record, -1);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  EventHandle event = event_of(handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  *status = event->done >= event->asked ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  *ms = static_cast<float>(event_of(end)->at_ms - event_of(start)->at_ms);
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
  *timestamp = static_cast<uint64_t>(event_of(event)->at_ms * 1000);
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  if (sim::current_device() < 0) return sim::fail(sim::kNoContext, "a stream was asked for before a device was set");
  *stream = new sim::Stream(sim::current_device());
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
// Its thread may still be at work, so the object stays.
aclError aclrtDestroyStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  sim::Stream* found = sim::stream_of(stream);
  *id = found ? found->id : -1;
  return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  sim::Stream* found = sim::stream_of(stream);
  *status = !found || found->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  sim::Stream* found = sim::stream_of(stream);
  return found ? found->synchronize(timeout_ms) : sim::kNoContext;
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtLaunchCallback(aclrtCallback callback, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  sim::Stream* found = sim::stream_of(stream);
  if (!found) return sim::kNoContext;
  found->enqueue([callback, data] { callback(data); return ACL_SUCCESS; });
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }

}  // extern "C"
