// Sockets, rendezvous and the check that ranks agree. See hccl_comm.hpp.
#include "hccl_comm.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "simulator.hpp"

namespace sim {
namespace {

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

double connect_timeout() { return static_cast<double>(knob("HCCL_CONNECT_TIMEOUT", 120)); }
double exec_timeout() { return static_cast<double>(knob("HCCL_EXEC_TIMEOUT", 1836)); }

bool write_all(int socket, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes) {
    const ssize_t sent = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

bool read_all(int socket, void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes) {
    const ssize_t got = ::recv(socket, at, bytes, 0);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

sockaddr_un address(const std::string& folder, int rank) {
  sockaddr_un found{};
  found.sun_family = AF_UNIX;
  snprintf(found.sun_path, sizeof found.sun_path, "%s/%d", folder.c_str(), rank);
  return found;
}

const char* const kNames[] = {"",          "Broadcast", "AllReduce", "Reduce",        "Send",     "Recv",
                              "AllGather", "ReduceScatter", "AlltoAllV", "AlltoAllVC", "AlltoAll", "Gather",
                              "Scatter",   "BatchSendRecv"};

void count_dtype(uint32_t dtype) { count(std::string("messages of ") + name_of(static_cast<HcclDataType>(dtype))); }

std::string op_name(uint32_t op) { return op < 14 ? kNames[op] : op == HCCL_CMD_BARRIER ? "Barrier" : std::to_string(op); }

}  // namespace

size_t size_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 1;
  }
}

const char* name_of(HcclDataType dtype) {
  static const char* const names[] = {"int8",   "int16",  "int32",   "float16",  "float32", "int64",
                                      "uint64", "uint8",  "uint16",  "uint32",   "float64", "bfloat16",
                                      "int128", "?",      "hif8",    "fp8_e4m3", "fp8_e5m2", "fp8_e8m0"};
  return dtype < 18 ? names[dtype] : "?";
}

Comm::Comm(std::string where, int my_rank, int ranks, int my_device)
    : rank(my_rank), size(ranks), device(my_device), folder(std::move(where)) {
  for (int i = 0; i < size; i++) peers_.push_back(std::make_unique<Peer>());
  if (size == 1) return;
  const double until = now() + connect_timeout();
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un own = address(folder, rank);
  if (::bind(listener_, reinterpret_cast<const sockaddr*>(&own), sizeof own) || ::listen(listener_, size))
    throw std::runtime_error("rank " + std::to_string(rank) + " is taken in this communicator: " + strerror(errno));
  for (int peer = 0; peer < rank; peer++) connect_to(peer, until);
  accept_from_higher(until);
  for (int peer = 0; peer < size; peer++)
    if (peer != rank) std::thread([this, peer] { read_from(peer); }).detach();
}

void Comm::close() {
  for (auto& peer : peers_)
    if (peer->socket >= 0) ::shutdown(peer->socket, SHUT_RDWR);
  if (listener_ < 0) return;
  ::close(listener_);
  listener_ = -1;
  ::unlink(address(folder, rank).sun_path);
  ::rmdir(folder.c_str());  // the last one succeeds
}

void Comm::check_hello(const Frame& hello) {
  if (hello.sequence != static_cast<uint64_t>(size))
    throw std::runtime_error("rank " + std::to_string(rank) + " counts " + std::to_string(size) + " ranks, rank " +
                             std::to_string(hello.give) + " counts " + std::to_string(hello.sequence));
  if (hello.take == static_cast<uint64_t>(device))
    throw std::runtime_error("rank " + std::to_string(hello.give) + " and rank " + std::to_string(rank) +
                             " both use npu:" + std::to_string(device));
}

void Comm::connect_to(int peer, double until) {
  const sockaddr_un theirs = address(folder, peer);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  while (::connect(socket, reinterpret_cast<const sockaddr*>(&theirs), sizeof theirs)) {
    if (now() > until)
      throw std::runtime_error("rank " + std::to_string(rank) + " waited HCCL_CONNECT_TIMEOUT for rank " +
                               std::to_string(peer) + " of the communicator");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  Frame hello;
  hello.kind = kHello;
  hello.sequence = static_cast<uint64_t>(size);
  hello.give = static_cast<uint64_t>(rank);
  hello.take = static_cast<uint64_t>(device);
  Frame answer;
  if (!write_all(socket, &hello, sizeof hello) || !read_all(socket, &answer, sizeof answer))
    throw std::runtime_error("rank " + std::to_string(peer) + " left while the communicator was made");
  check_hello(answer);
  peers_[peer]->socket = socket;
}

void Comm::accept_from_higher(double until) {
  for (int missing = size - 1 - rank; missing > 0; missing--) {
    pollfd waiting{listener_, POLLIN, 0};
    const int left_ms = static_cast<int>((until - now()) * 1000);
    if (left_ms <= 0 || ::poll(&waiting, 1, left_ms) <= 0)
      throw std::runtime_error("rank " + std::to_string(rank) + " waited HCCL_CONNECT_TIMEOUT for " +
                               std::to_string(missing) + " more ranks of the communicator");
    const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    Frame hello, answer;
    answer.kind = kHello;
    answer.sequence = static_cast<uint64_t>(size);
    answer.give = static_cast<uint64_t>(rank);
    answer.take = static_cast<uint64_t>(device);
    if (!read_all(socket, &hello, sizeof hello) || !write_all(socket, &answer, sizeof answer))
      throw std::runtime_error("a rank left while the communicator was made");
    check_hello(hello);
    peers_[hello.give]->socket = socket;
  }
}

void Comm::read_from(int from) {
  Peer& peer = *peers_[from];
  Frame frame;
  while (read_all(peer.socket, &frame, sizeof frame)) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (frame.kind == kReady) {
      peer.ready[frame.channel].push_back(frame);
    } else {  // data, which this rank has said it is ready for
      std::shared_ptr<Landing> landing = peer.landings[frame.channel].front();
      peer.landings[frame.channel].pop_front();
      lock.unlock();
      const bool whole = read_all(peer.socket, landing->data, landing->bytes);
      lock.lock();
      landing->done = whole;
    }
    changed_.notify_all();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  peer.lost = "rank " + std::to_string(from) + " is gone";
  changed_.notify_all();
}

std::string Comm::send(int to, const Frame& frame, const void* data, size_t bytes) {
  Peer& peer = *peers_[to];
  std::lock_guard<std::mutex> lock(peer.writing);
  const bool whole = write_all(peer.socket, &frame, sizeof frame) && (!bytes || write_all(peer.socket, data, bytes));
  return whole ? "" : "rank " + std::to_string(to) + " is gone";
}

std::string Comm::await(std::unique_lock<std::mutex>& lock, double until, const std::function<bool()>& done, int peer,
                        const std::string& doing) {
  while (!done()) {
    if (!peers_[peer]->lost.empty()) return peers_[peer]->lost + " while rank " + std::to_string(rank) + " did " + doing;
    if (now() > until)
      return "rank " + std::to_string(rank) + " waited HCCL_EXEC_TIMEOUT for rank " + std::to_string(peer) + " in " + doing;
    changed_.wait_for(lock, std::chrono::milliseconds(50));
  }
  return "";
}

std::string Comm::describe(const Frame& frame, int of_rank) const {
  const HcclDataType dtype = static_cast<HcclDataType>(frame.call.dtype);
  return "rank " + std::to_string(of_rank) + " calls " + op_name(frame.call.op) + " no. " + std::to_string(frame.sequence) +
         " (" + name_of(dtype) + ", gives " + std::to_string(frame.give) + " bytes, takes " + std::to_string(frame.take) +
         ", detail " + std::to_string(frame.call.detail) + ")";
}

std::string Comm::collective(const Call& call, const std::vector<Share>& shares) {
  const double until = now() + exec_timeout();
  const uint64_t sequence = ++sequence_;
  if (call.op != HCCL_CMD_BARRIER) count_dtype(call.dtype);
  std::vector<Frame> notes(size);
  std::vector<std::shared_ptr<Landing>> landings(size);
  for (int peer = 0; peer < size; peer++) {
    if (peer == rank) continue;
    Frame& note = notes[peer];
    note.kind = kReady;
    note.channel = kCollective;
    note.call = call;
    note.sequence = sequence;
    note.give = shares[peer].give_bytes;
    note.take = shares[peer].take_bytes;
    if (note.take) {
      landings[peer] = std::make_shared<Landing>(Landing{shares[peer].take, note.take, false});
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer]->landings[kCollective].push_back(landings[peer]);
    }
    if (std::string error = send(peer, note, nullptr, 0); !error.empty()) return error;
  }
  for (int step = 1; step < size; step++) {
    const int peer = (rank + step) % size;
    std::unique_lock<std::mutex> lock(mutex_);
    auto& ready = peers_[peer]->ready[kCollective];
    if (std::string error = await(lock, until, [&] { return !ready.empty(); }, peer, op_name(call.op)); !error.empty()) return error;
    const Frame theirs = ready.front();
    ready.pop_front();
    lock.unlock();
    const Frame& mine = notes[peer];
    if (memcmp(&theirs.call, &mine.call, sizeof call) || theirs.sequence != sequence || theirs.take != mine.give || theirs.give != mine.take)
      return "ranks disagree: " + describe(mine, rank) + ", " + describe(theirs, peer);
    if (!mine.give) continue;
    Frame data = mine;
    data.kind = kData;
    if (std::string error = send(peer, data, shares[peer].give, mine.give); !error.empty()) return error;
  }
  for (int peer = 0; peer < size; peer++) {
    if (!landings[peer]) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    if (std::string error = await(lock, until, [&] { return landings[peer]->done; }, peer, op_name(call.op)); !error.empty()) return error;
  }
  return "";
}

std::string Comm::deliver(const Transfer& transfer) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& ready = peers_[transfer.peer]->ready[kP2P];
  const Frame theirs = ready.front();
  ready.pop_front();
  lock.unlock();
  Frame data;
  data.kind = kData;
  data.channel = kP2P;
  data.call = {HCCL_CMD_SEND, transfer.dtype, 0};
  data.give = transfer.bytes;
  if (theirs.take != transfer.bytes || theirs.call.dtype != transfer.dtype)
    return "ranks disagree: " + describe(data, rank) + ", " + describe(theirs, static_cast<int>(transfer.peer));
  return send(static_cast<int>(transfer.peer), data, transfer.data, transfer.bytes);
}

std::string Comm::point_to_point(const std::vector<Transfer>& transfers) {
  const double until = now() + exec_timeout();
  std::vector<std::pair<int, std::shared_ptr<Landing>>> due;
  std::deque<Transfer> sends;
  for (const Transfer& transfer : transfers) {
    count_dtype(transfer.dtype);
    if (transfer.sends) {
      sends.push_back(transfer);
      continue;
    }
    const int peer = static_cast<int>(transfer.peer);
    auto landing = std::make_shared<Landing>(Landing{transfer.data, transfer.bytes, false});
    due.emplace_back(peer, landing);
    std::unique_lock<std::mutex> lock(mutex_);
    peers_[peer]->landings[kP2P].push_back(landing);
    lock.unlock();
    Frame note;
    note.kind = kReady;
    note.channel = kP2P;
    note.call = {HCCL_CMD_RECEIVE, transfer.dtype, 0};
    note.take = transfer.bytes;
    if (std::string error = send(peer, note, nullptr, 0); !error.empty()) return error;
  }
  while (!sends.empty()) {  // whichever receiver is ready first
    std::unique_lock<std::mutex> lock(mutex_);
    auto next = sends.begin();
    auto any_ready = [&] {
      for (next = sends.begin(); next != sends.end(); ++next)
        if (!peers_[next->peer]->ready[kP2P].empty()) return true;
      return false;
    };
    const int first = static_cast<int>(sends.front().peer);
    if (std::string error = await(lock, until, any_ready, first, "Send"); !error.empty()) return error;
    const Transfer transfer = *next;
    lock.unlock();
    sends.erase(next);
    if (std::string error = deliver(transfer); !error.empty()) return error;
  }
  for (auto& [peer, landing] : due) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto& arrived = landing;
    if (std::string error = await(lock, until, [&] { return arrived->done; }, peer, "Recv"); !error.empty()) return error;
  }
  return "";
}

}  // namespace sim
