// Devices and memory of the simulated NPU: host memory with a budget per device, poisoned when handed out.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>

#include "simulator.hpp"

namespace sim {
namespace {

enum class Kind { kDevice, kPinned };

struct Block {
  size_t size;
  int device;
  Kind kind;
  void* base;  // what free() wants; nullptr for mapped memory
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Block> blocks;
  std::map<uintptr_t, size_t> reserved;  // virtual ranges
  std::map<int, size_t> used;
  std::map<int, Stream*> own_streams;
  std::set<int> active;
};

Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}

thread_local int the_device = -1;

struct Physical {
  size_t size;
  int device;
};

size_t budget() { return static_cast<size_t>(knob("SIMULATED_NPU_MB", 16384)) << 20; }

int visible_devices() {
  const int all = static_cast<int>(knob("SIMULATED_NPU_COUNT", 8));
  const std::string chosen = knob_text("ASCEND_RT_VISIBLE_DEVICES", "");
  if (chosen.empty()) return all;
  int found = 0;
  for (size_t at = 0; at < chosen.size(); at = chosen.find(',', at), at = at == std::string::npos ? chosen.size() : at + 1)
    if (atoi(chosen.c_str() + at) < all) found++;
  return found;
}

// All ones are NaN in every float format, so memory that was never written shows.
void poison(void* at, size_t size) { memset(at, 0xff, size); }

// The block that holds `ptr`, or nullptr. Call with the lock held.
const Block* find(const void* ptr) {
  auto after = memory().blocks.upper_bound(reinterpret_cast<uintptr_t>(ptr));
  if (after == memory().blocks.begin()) return nullptr;
  --after;
  return reinterpret_cast<uintptr_t>(ptr) < after->first + after->second.size ? &after->second : nullptr;
}

bool is_plain_host(const void* ptr) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return find(ptr) == nullptr;
}

aclError allocate(void** ptr, size_t size, Kind kind) {
  const int device = the_device;
  if (kind == Kind::kDevice && !take_memory(device, size)) {
    *ptr = nullptr;
    return fail(kOutOfMemory, "out of memory on simulated device " + std::to_string(device) + ": " +
                                  std::to_string(size) + " bytes more than the rest of " + std::to_string(budget()));
  }
  if (posix_memalign(ptr, 512, size ? size : 512)) return fail(kOutOfMemory, "the host has no memory left");
  poison(*ptr, size);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[reinterpret_cast<uintptr_t>(*ptr)] = {size, device, kind, *ptr};
  return ACL_SUCCESS;
}

aclError release(void* ptr) {
  std::unique_lock<std::mutex> lock(memory().mutex);
  auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == memory().blocks.end() || !found->second.base)
    return fail(ACL_ERROR_INVALID_PARAM, "freed an address that was not allocated");
  const Block block = found->second;
  memory().blocks.erase(found);
  lock.unlock();
  if (block.kind == Kind::kDevice) give_memory(block.device, block.size);
  free(block.base);
  return ACL_SUCCESS;
}

}  // namespace

int current_device() { return the_device; }

bool take_memory(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  size_t& used = memory().used[device];
  if (used + bytes > budget()) return false;
  used += bytes;
  return true;
}

void give_memory(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().used[device] -= bytes;
}

Stream* stream_of(aclrtStream handle) {
  if (handle) return static_cast<Stream*>(handle);
  if (the_device < 0) return nullptr;
  std::lock_guard<std::mutex> lock(memory().mutex);
  Stream*& own = memory().own_streams[the_device];
  if (!own) own = new Stream(the_device);
  return own;
}

}  // namespace sim

using sim::fail;
using sim::memory;

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclrtGetSocName() {
  static const std::string* name = new std::string(sim::knob_text("SIMULATED_NPU_SOC", "Ascend910B1"));
  return name->c_str();
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(sim::visible_devices());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= sim::visible_devices())
    return fail(sim::kBadDevice, "device " + std::to_string(device) + " of " +
                                     std::to_string(sim::visible_devices()) + " simulated devices");
  sim::the_device = device;
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().active.insert(device);
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  *device = sim::the_device;
  return sim::the_device < 0 ? sim::kNoContext : ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (flags) *flags = 0;
  *active = memory().active.count(device) ? 1 : 0;
  return ACL_SUCCESS;
}

// A context is its device's number, plus one since nullptr means none.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(sim::the_device + 1));
  return sim::the_device < 0 ? sim::kNoContext : ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context)) - 1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  return sim::the_device < 0 ? ACL_SUCCESS : sim::synchronize_device(sim::the_device, timeout_ms);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = what == ACL_DEVICE_INFO_L2_SIZE ? 192 << 20 : what == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : 24;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  if (sim::the_device < 0) return sim::kNoContext;
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total = sim::budget();
  *free_bytes = *total - memory().used[sim::the_device];
  return ACL_SUCCESS;
}

aclError aclrtMalloc(void** ptr, size_t size, aclrtMemMallocPolicy) { return sim::allocate(ptr, size, sim::Kind::kDevice); }
aclError aclrtMallocAlign32(void** ptr, size_t size, aclrtMemMallocPolicy policy) { return aclrtMalloc(ptr, size, policy); }
aclError aclrtFree(void* ptr) { return sim::release(ptr); }
aclError aclrtMallocHost(void** ptr, size_t size) { return sim::allocate(ptr, size, sim::Kind::kPinned); }
aclError aclrtFreeHost(void* ptr) { return sim::release(ptr); }

aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const sim::Block* block = sim::find(ptr);
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = !block                              ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : block->kind == sim::Kind::kDevice ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                                  : ACL_MEM_LOCATION_TYPE_HOST;
  attributes->location.id = block && block->device >= 0 ? static_cast<uint32_t>(block->device) : 0;
  return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void** ptr, size_t size, size_t, void* expected, uint64_t) {
  *ptr = mmap(expected, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*ptr == MAP_FAILED) return fail(sim::kOutOfMemory, "no address range of that size");
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().reserved[reinterpret_cast<uintptr_t>(*ptr)] = size;
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* ptr) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().reserved.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == memory().reserved.end()) return ACL_ERROR_INVALID_PARAM;
  munmap(ptr, found->second);
  memory().reserved.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* prop, uint64_t) {
  const int device = static_cast<int>(prop->location.id);
  if (!sim::take_memory(device, size))
    return fail(sim::kOutOfMemory, "out of memory on simulated device " + std::to_string(device));
  *handle = new sim::Physical{size, device};
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = static_cast<sim::Physical*>(handle);
  sim::give_memory(physical->device, physical->size);
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* ptr, size_t size, size_t, aclrtDrvMemHandle handle, uint64_t) {
  if (mprotect(ptr, size, PROT_READ | PROT_WRITE)) return fail(sim::kOutOfMemory, "could not map memory");
  sim::poison(ptr, size);
  std::lock_guard<std::mutex> lock(memory().mutex);
  const int device = static_cast<sim::Physical*>(handle)->device;
  memory().blocks[reinterpret_cast<uintptr_t>(ptr)] = {size, device, sim::Kind::kDevice, nullptr};
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* ptr) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == memory().blocks.end()) return ACL_ERROR_INVALID_PARAM;
  mmap(ptr, found->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  memory().blocks.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind) {
  if (size > room) return fail(ACL_ERROR_INVALID_PARAM, "a copy is larger than its target");
  memmove(to, from, size);
  return ACL_SUCCESS;
}

// A copy from or to pageable memory is over when the call returns, as on the real device.
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind, aclrtStream handle) {
  if (size > room) return fail(ACL_ERROR_INVALID_PARAM, "a copy is larger than its target");
  sim::Stream* stream = sim::stream_of(handle);
  if (!stream) return sim::kNoContext;
  stream->enqueue([=] { memmove(to, from, size); return ACL_SUCCESS; });
  return sim::is_plain_host(to) || sim::is_plain_host(from) ? stream->synchronize(-1) : ACL_SUCCESS;
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t size) {
  if (size > room) return ACL_ERROR_INVALID_PARAM;
  memset(to, value, size);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t size, aclrtStream handle) {
  sim::Stream* stream = sim::stream_of(handle);
  if (!stream || size > room) return ACL_ERROR_INVALID_PARAM;
  stream->enqueue([=] { memset(to, value, size); return ACL_SUCCESS; });
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { *can = 1; return ACL_SUCCESS; }
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) { *pid = static_cast<int32_t>(getpid()); return ACL_SUCCESS; }

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  strncpy(version->version, sim::knob_text("SIMULATED_CANN", "9.1.0").c_str(), sizeof version->version - 1);
  return ACL_SUCCESS;
}

// Options that change nothing here.
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) { *value = 0; return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t* value) { *value = 0; return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

}  // extern "C"
