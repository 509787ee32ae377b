// libhccl.so: the collectives of the simulated HCCL, enqueued on the stream they are given.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <thread>

#include "hccl_comm.hpp"
#include "simulator.hpp"

using sim::Call;
using sim::Comm;
using sim::Share;
using sim::Transfer;

namespace {

float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                         : std::ldexp(exponent ? 1024.f + mantissa : mantissa, exponent ? exponent - 25 : -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

uint16_t float_to_half(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}

float brain_to_float(uint16_t brain) {
  const uint32_t bits = static_cast<uint32_t>(brain) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_brain(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T>
T combine(T a, T b, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_PROD: return a * b;
    case HCCL_REDUCE_MAX: return a > b ? a : b;
    case HCCL_REDUCE_MIN: return a < b ? a : b;
    default: return a + b;
  }
}

template <typename T>
void reduce_as(void* into, const void* with, size_t count, HcclReduceOp op) {
  T* a = static_cast<T*>(into);
  const T* b = static_cast<const T*>(with);
  for (size_t i = 0; i < count; i++) a[i] = combine(a[i], b[i], op);
}

void reduce_halves(void* into, const void* with, size_t count, HcclReduceOp op, float (*read)(uint16_t), uint16_t (*write)(float)) {
  uint16_t* a = static_cast<uint16_t*>(into);
  const uint16_t* b = static_cast<const uint16_t*>(with);
  for (size_t i = 0; i < count; i++) a[i] = write(combine(read(a[i]), read(b[i]), op));
}

bool reducible(HcclDataType dtype) {
  const bool newest = sim::knob_text("SIMULATED_NPU_SOC", "Ascend910B1").find("950") != std::string::npos;
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: case HCCL_DATA_TYPE_FP32: return true;
    case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return newest;
    default: return false;
  }
}

void reduce(void* into, const void* with, size_t count, HcclDataType dtype, HcclReduceOp op) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(into, with, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(into, with, count, op);
    case HCCL_DATA_TYPE_UINT64: return reduce_as<uint64_t>(into, with, count, op);
    case HCCL_DATA_TYPE_FP32: return reduce_as<float>(into, with, count, op);
    case HCCL_DATA_TYPE_FP64: return reduce_as<double>(into, with, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_halves(into, with, count, op, half_to_float, float_to_half);
    default: return reduce_halves(into, with, count, op, brain_to_float, float_to_brain);
  }
}

Comm& comm_of(HcclComm handle) { return *static_cast<Comm*>(handle); }

HcclResult enqueue(const std::string& name, aclrtStream handle, std::function<std::string()> work) {
  sim::count(name);
  sim::Stream* stream = sim::stream_of(handle);
  if (!stream) return HCCL_E_RUNTIME;
  stream->enqueue([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(sim::knob("SIMULATED_HCCL_DELAY_MS", 0)));
    const std::string error = work();
    if (error.empty()) return ACL_SUCCESS;
    fprintf(stderr, "simulated HCCL: %s: %s\n", name.c_str(), error.c_str());
    return sim::fail(error.find("TIMEOUT") != std::string::npos ? sim::kTimedOut : sim::kTaskFailed, name + ": " + error);
  });
  return HCCL_SUCCESS;
}

// Everyone gives everyone `send`; what comes lies by rank in the result, this rank's own included.
std::string gather_all(Comm& comm, const Call& call, const void* send, size_t bytes, std::vector<char>& all) {
  all.resize(bytes * comm.size);
  std::vector<Share> shares(comm.size);
  for (int peer = 0; peer < comm.size; peer++) shares[peer] = {send, bytes, all.data() + peer * bytes, bytes};
  memcpy(all.data() + comm.rank * bytes, send, bytes);
  return comm.collective(call, shares);
}

HcclResult unsupported(const char* name, HcclDataType dtype) {
  sim::fail(ACL_ERROR_INVALID_PARAM, std::string(name) + " does not take " + sim::name_of(dtype) + " on this chip");
  return HCCL_E_NOT_SUPPORT;
}

char* at(const void* base, size_t bytes) { return static_cast<char*>(const_cast<void*>(base)) + bytes; }

// HcclSend and HcclRecv between HcclGroupStart and HcclGroupEnd wait for the outermost end. torch_npu makes all
// calls of one group on one thread.
struct Group {
  int depth = 0;
  std::vector<Transfer> transfers;
  Comm* comm = nullptr;
  aclrtStream stream = nullptr;
};
thread_local Group group;

HcclResult transfer(const char* name, Transfer one, HcclComm handle, aclrtStream stream) {
  Comm* comm = &comm_of(handle);
  if (group.depth) {
    if (group.comm && group.comm != comm) {
      sim::fail(ACL_ERROR_INVALID_PARAM, "one group of sends and receives uses two communicators");
      return HCCL_E_PARA;
    }
    group.comm = comm;
    group.stream = stream;
    group.transfers.push_back(one);
    return HCCL_SUCCESS;
  }
  return enqueue(name, stream, [=] { return comm->point_to_point({one}); });
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  memset(info, 0, sizeof *info);
  const std::string pattern = sim::knob_text("TMPDIR", "/tmp") + "/simulated-hccl-XXXXXX";
  strncpy(info->internal, pattern.c_str(), sizeof info->internal - 1);
  return mkdtemp(info->internal) ? HCCL_SUCCESS : HCCL_E_SYSCALL;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config, HcclComm* comm) {
  sim::count("HcclCommInit");
  const bool told = config && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET;
  const size_t buffer = static_cast<size_t>(told ? config->hcclBufferSize : sim::knob("HCCL_BUFFSIZE", 200)) << 20;
  const int device = sim::current_device();
  if (!sim::take_memory(device, 2 * buffer)) {
    sim::fail(sim::kOutOfMemory, "no room for a communicator's buffers, 2 x " + std::to_string(buffer >> 20) + " MB");
    return HCCL_E_OOM;
  }
  sim::count("communicator MB", static_cast<long>(2 * buffer >> 20));
  try {
    auto made = std::make_unique<Comm>(info->internal, static_cast<int>(rank), static_cast<int>(ranks), device);
    made->buffer_bytes = 2 * buffer;
    *comm = made.release();
    return HCCL_SUCCESS;
  } catch (const std::runtime_error& error) {
    sim::give_memory(device, 2 * buffer);
    fprintf(stderr, "simulated HCCL: %s\n", error.what());
    sim::fail(ACL_ERROR_INVALID_PARAM, error.what());
    return std::string(error.what()).find("TIMEOUT") != std::string::npos ? HCCL_E_TIMEOUT : HCCL_E_PARA;
  }
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, comm);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  Comm& comm = comm_of(handle);
  sim::give_memory(comm.device, comm.buffer_bytes);
  comm.close();
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) { *rank = static_cast<uint32_t>(comm_of(comm).rank); return HCCL_SUCCESS; }
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) { *size = static_cast<uint32_t>(comm_of(comm).size); return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) { *error = HCCL_SUCCESS; return HCCL_SUCCESS; }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_EXEC_TIMEOUT; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
const char* HcclGetErrorString(HcclResult code) {
  return code == HCCL_E_TIMEOUT ? "timeout" : code == HCCL_E_PARA ? "parameter error" : code == HCCL_E_NOT_SUPPORT ? "not supported" : "simulated HCCL error";
}
HcclResult HcclGetCommName(HcclComm comm, char* name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", comm_of(comm).folder.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  if (!reducible(dtype)) return unsupported("HcclAllReduce", dtype);
  return enqueue("HcclAllReduce", stream, [=] {
    Comm& comm = comm_of(handle);
    const size_t bytes = count * sim::size_of(dtype);
    std::vector<char> all;
    std::string error = gather_all(comm, {HCCL_CMD_ALLREDUCE, dtype, static_cast<uint32_t>(op)}, send, bytes, all);
    if (!error.empty()) return error;
    for (int peer = 1; peer < comm.size; peer++) reduce(all.data(), all.data() + peer * bytes, count, dtype, op);
    memcpy(receive, all.data(), bytes);
    return error;
  });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, uint32_t root, HcclComm handle, aclrtStream stream) {
  if (!reducible(dtype)) return unsupported("HcclReduce", dtype);
  return enqueue("HcclReduce", stream, [=] {
    Comm& comm = comm_of(handle);
    const size_t bytes = count * sim::size_of(dtype);
    const bool here = comm.rank == static_cast<int>(root);
    std::vector<char> all(here ? bytes * comm.size : 0);
    std::vector<Share> shares(comm.size);
    if (here) {
      for (int peer = 0; peer < comm.size; peer++) shares[peer] = {nullptr, 0, all.data() + peer * bytes, bytes};
      memcpy(all.data() + comm.rank * bytes, send, bytes);
    } else shares[root] = {send, bytes, nullptr, 0};
    std::string error = comm.collective({HCCL_CMD_REDUCE, dtype, root * 8 + static_cast<uint32_t>(op)}, shares);
    if (!error.empty() || !here) return error;
    for (int peer = 1; peer < comm.size; peer++) reduce(all.data(), all.data() + peer * bytes, count, dtype, op);
    memcpy(receive, all.data(), bytes);
    return error;
  });
}

HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle, aclrtStream stream) {
  return enqueue("HcclBroadcast", stream, [=] {
    Comm& comm = comm_of(handle);
    const size_t bytes = count * sim::size_of(dtype);
    std::vector<Share> shares(comm.size);
    if (comm.rank == static_cast<int>(root))
      for (Share& share : shares) share = {data, bytes, nullptr, 0};
    else shares[root] = {nullptr, 0, data, bytes};
    return comm.collective({HCCL_CMD_BROADCAST, dtype, root}, shares);
  });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle, aclrtStream stream) {
  return enqueue("HcclScatter", stream, [=] {
    Comm& comm = comm_of(handle);
    const size_t bytes = count * sim::size_of(dtype);
    std::vector<Share> shares(comm.size);
    if (comm.rank == static_cast<int>(root)) {
      for (int peer = 0; peer < comm.size; peer++) shares[peer] = {at(send, peer * bytes), bytes, nullptr, 0};
      memmove(receive, at(send, comm.rank * bytes), bytes);
    } else shares[root] = {nullptr, 0, receive, bytes};
    return comm.collective({HCCL_CMD_SCATTER, dtype, root}, shares);
  });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* displacements, HcclDataType dtype, HcclComm handle, aclrtStream stream) {
  Comm& comm = comm_of(handle);
  const auto* taken = static_cast<const uint64_t*>(counts);
  const auto* places = static_cast<const uint64_t*>(displacements);
  const size_t size = sim::size_of(dtype);
  std::vector<Share> shares(comm.size);
  for (int peer = 0; peer < comm.size; peer++) shares[peer] = {send, count * size, at(receive, places[peer] * size), taken[peer] * size};
  return enqueue("HcclAllGatherV", stream, [=] {
    memmove(shares[comm_of(handle).rank].take, send, count * size);
    return comm_of(handle).collective({HCCL_CMD_ALLGATHER_V, dtype, 0}, shares);
  });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclComm handle, aclrtStream stream) {
  return enqueue("HcclAllGather", stream, [=] {
    Comm& comm = comm_of(handle);
    const size_t bytes = count * sim::size_of(dtype);
    std::vector<Share> shares(comm.size);
    for (int peer = 0; peer < comm.size; peer++) shares[peer] = {send, bytes, at(receive, peer * bytes), bytes};
    memmove(at(receive, comm.rank * bytes), send, bytes);
    return comm.collective({HCCL_CMD_ALLGATHER, dtype, 0}, shares);
  });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* displacements, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  if (!reducible(dtype)) return unsupported("HcclReduceScatter", dtype);
  Comm& comm = comm_of(handle);
  const size_t size = sim::size_of(dtype), bytes = count * size;
  const auto* given = static_cast<const uint64_t*>(counts);
  const auto* places = static_cast<const uint64_t*>(displacements);
  std::vector<Share> shares(comm.size);
  for (int peer = 0; peer < comm.size; peer++) shares[peer] = {at(send, places[peer] * size), given[peer] * size, nullptr, bytes};
  return enqueue("HcclReduceScatter", stream, [=] {
    Comm& here = comm_of(handle);
    std::vector<char> all(bytes * here.size);
    std::vector<Share> own = shares;
    for (int peer = 0; peer < here.size; peer++) own[peer].take = all.data() + peer * bytes;
    memcpy(all.data() + here.rank * bytes, own[here.rank].give, bytes);
    std::string error = here.collective({HCCL_CMD_REDUCE_SCATTER, dtype, static_cast<uint32_t>(op)}, own);
    if (!error.empty()) return error;
    for (int peer = 1; peer < here.size; peer++) reduce(all.data(), all.data() + peer * bytes, count, dtype, op);
    memcpy(receive, all.data(), bytes);
    return error;
  });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  const int size = comm_of(handle).size;
  std::vector<uint64_t> counts(size, count), places(size);
  for (int peer = 0; peer < size; peer++) places[peer] = count * peer;
  return HcclReduceScatterV(send, counts.data(), places.data(), receive, count, dtype, op, handle, stream);
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_places, HcclDataType send_type, const void* receive, const void* receive_counts, const void* receive_places, HcclDataType, HcclComm handle, aclrtStream stream) {
  const int ranks = comm_of(handle).size;
  const auto* give = static_cast<const uint64_t*>(send_counts);
  const auto* from = static_cast<const uint64_t*>(send_places);
  const auto* take = static_cast<const uint64_t*>(receive_counts);
  const auto* into = static_cast<const uint64_t*>(receive_places);
  const size_t size = sim::size_of(send_type);
  std::vector<Share> shares(ranks);
  for (int peer = 0; peer < ranks; peer++)
    shares[peer] = {at(send, from[peer] * size), give[peer] * size, at(receive, into[peer] * size), take[peer] * size};
  return enqueue("HcclAlltoAllV", stream, [=] {
    Comm& comm = comm_of(handle);
    const Share& own = shares[comm.rank];
    if (own.give_bytes != own.take_bytes)
      return "rank " + std::to_string(comm.rank) + " gives itself " + std::to_string(own.give_bytes) + " bytes and takes " + std::to_string(own.take_bytes);
    memmove(own.take, own.give, own.give_bytes);
    return comm.collective({HCCL_CMD_ALLTOALLV, send_type, 0}, shares);
  });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive, uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
  const int size = comm_of(handle).size;
  std::vector<uint64_t> give(size, send_count), take(size, receive_count), from(size), into(size);
  for (int peer = 0; peer < size; peer++) from[peer] = send_count * peer, into[peer] = receive_count * peer;
  return HcclAlltoAllV(send, give.data(), from.data(), send_type, receive, take.data(), into.data(), receive_type, handle, stream);
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  return enqueue("HcclBarrier", stream, [=] {
    return comm_of(handle).collective({HCCL_CMD_BARRIER, 0, 0}, std::vector<Share>(comm_of(handle).size));
  });
}

HcclResult HcclSend(void* data, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return transfer("HcclSend", {true, data, count * sim::size_of(dtype), dtype, peer}, comm, stream);
}

HcclResult HcclRecv(void* data, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return transfer("HcclRecv", {false, data, count * sim::size_of(dtype), dtype, peer}, comm, stream);
}

HcclResult HcclGroupStart() {
  group.depth++;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  if (group.depth == 0) return HCCL_E_PARA;
  if (--group.depth || group.transfers.empty()) return HCCL_SUCCESS;
  Group whole;
  std::swap(whole, group);
  return enqueue("HcclGroup", whole.stream, [=] { return whole.comm->point_to_point(whole.transfers); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  std::vector<Transfer> transfers;
  std::set<std::pair<bool, uint32_t>> seen;
  const bool strict = sim::knob("SIMULATED_HCCL_STRICT", 1) != 0;
  for (uint32_t i = 0; i < count; i++) {
    const bool sends = items[i].sendRecvType == HCCL_SEND;
    if (!seen.emplace(sends, items[i].remoteRank).second && strict) {
      sim::fail(ACL_ERROR_INVALID_PARAM, std::string("HcclBatchSendRecv: two ") + (sends ? "sends to" : "receives from") +
                                             " rank " + std::to_string(items[i].remoteRank) + " in one call");
      return HCCL_E_PARA;
    }
    transfers.push_back({sends, items[i].buf, items[i].count * sim::size_of(items[i].dataType), items[i].dataType, items[i].remoteRank});
  }
  return enqueue("HcclBatchSendRecv", stream, [=] { return comm_of(handle).point_to_point(transfers); });
}

}  // extern "C"
