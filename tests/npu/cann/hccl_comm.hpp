// One communicator of the simulated HCCL: a Unix socket to every other rank, and a thread that reads each.
//
// A message travels only once its receiver has said that it is ready for it (rendezvous), so data never piles
// up in a socket and a rank that never receives makes its sender wait. Each note carries what its rank is
// doing; ranks that do different things get an error that names both.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl.h"

namespace sim {

size_t size_of(HcclDataType dtype);
const char* name_of(HcclDataType dtype);

// A call as its rank sees it. `detail` is the reduce operation or the root.
struct Call {
  uint32_t op = 0;  // HcclCMDType
  uint32_t dtype = 0;
  uint32_t detail = 0;
};

// What this rank gives to, and takes from, one peer in a call.
struct Share {
  const void* give = nullptr;
  size_t give_bytes = 0;
  void* take = nullptr;
  size_t take_bytes = 0;
};

struct Transfer {
  bool sends;
  void* data;
  size_t bytes;
  uint32_t dtype;
  uint32_t peer;
};

class Comm {
 public:
  // Meets the other ranks in the folder that the root named. Throws std::runtime_error.
  Comm(std::string folder, int rank, int size, int device);
  // Hangs up. The object stays, since its threads and tasks of failed streams may still look at it.
  void close();

  // All ranks call it with the same `call`; shares by rank, this rank's own is ignored. Returns an error text or "".
  std::string collective(const Call& call, const std::vector<Share>& shares);
  // Sends and receives at once, in the order given for each peer.
  std::string point_to_point(const std::vector<Transfer>& transfers);

  const int rank, size, device;
  const std::string folder;
  size_t buffer_bytes = 0;

 private:
  enum Kind : uint32_t { kHello = 1, kReady, kData };
  enum Channel : uint32_t { kP2P = 0, kCollective = 1 };
  struct Frame {
    uint32_t kind = 0, channel = 0;
    Call call;
    uint64_t sequence = 0, give = 0, take = 0;  // bytes; a hello has rank and device here
  };
  struct Landing {
    void* data;
    size_t bytes;
    bool done;
  };
  struct Peer {
    int socket = -1;
    std::mutex writing;
    std::deque<Frame> ready[2];
    std::deque<std::shared_ptr<Landing>> landings[2];
    std::string lost;
  };

  void connect_to(int peer, double until);
  void accept_from_higher(double until);
  void check_hello(const Frame& hello);
  void read_from(int peer);
  std::string send(int peer, const Frame& frame, const void* data, size_t bytes);
  std::string await(std::unique_lock<std::mutex>& lock, double until, const std::function<bool()>& done, int peer,
                    const std::string& doing);
  std::string describe(const Frame& frame, int of_rank) const;
  std::string deliver(const Transfer& transfer);

  std::vector<std::unique_ptr<Peer>> peers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t sequence_ = 0;
  int listener_ = -1;
};

}  // namespace sim
