// A device of our own for torch's PrivateUse1 slot: several cards of host memory, poisoned when handed out.
//
// Registered when the library is loaded: allocator, device guard, generators and what makes and views memory.
// Streams are stubs: work is done when its call returns.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMost = 16;

int cards() {
  const char* text = getenv("SIMULATED_MUSA_COUNT");
  return text ? atoi(text) : 8;
}

size_t budget() {
  const char* text = getenv("SIMULATED_MUSA_MB");
  return static_cast<size_t>(text ? atol(text) : 16384) << 20;
}

thread_local c10::DeviceIndex current = 0;

struct Memory {
  std::mutex mutex;
  size_t used[kMost] = {}, peak[kMost] = {};
} memory;

struct Block {
  void* data;
  size_t size;
  int card;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.used[block->card] -= block->size;
  }
  free(block->data);
  delete block;
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device card(kType, current);
    auto* block = new Block{nullptr, size, current};
    if (size) {
      std::lock_guard<std::mutex> lock(memory.mutex);
      size_t& used = memory.used[current];
      TORCH_CHECK_WITH(OutOfMemoryError, used + size <= budget(), "MUSA out of memory: ", size, " bytes on card ",
                       static_cast<int>(current), " with ", budget() - used, " left");
      used += size;
      memory.peak[current] = std::max(memory.peak[current], used);
      TORCH_CHECK(!posix_memalign(&block->data, 256, size), "the host has no memory left");
      memset(block->data, 0xff, size);  // NaN in every float format
    }
    return {block->data, block, &release, card};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

CardAllocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old(kType, current);
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < cards(), "invalid MUSA device ordinal ", device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(cards()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct CardGenerator final : at::CPUGeneratorImpl {
  explicit CardGenerator(c10::DeviceIndex card) {
    device_ = c10::Device(kType, card);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return cards() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(cards()); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex card) const override { Guard().setDevice({kType, card}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    return Guard().exchangeDevice({kType, card}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchangeDevice(card); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override {
    static auto* generators = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < kMost; i++) made->push_back(at::make_generator<CardGenerator>(static_cast<c10::DeviceIndex>(i)));
      return made;
    }();
    return (*generators)[card < 0 ? current : card];
  }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<CardGenerator>(card < 0 ? current : card);
  }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole(at::Tensor& self, at::Storage storage) { return at::cpu::set_(self, storage); }

// `tensor.data = other` between the host and a card, as the vendor's patch of torch allows it (TensorImpl.h).
bool may_take_data(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("_has_compatible_shallow_copy_type", &may_take_data);
}

const bool registered = [] {
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

extern "C" {
int card_count() { return cards(); }
int current_card() { return current; }
int set_card(int card) {
  if (card < 0 || card >= cards()) return -1;
  current = static_cast<c10::DeviceIndex>(card);
  return 0;
}
size_t card_memory() { return budget(); }
size_t memory_used(int card) { std::lock_guard<std::mutex> lock(memory.mutex); return memory.used[card]; }
size_t memory_peak(int card) { std::lock_guard<std::mutex> lock(memory.mutex); return memory.peak[card]; }
void reset_peak(int card) { std::lock_guard<std::mutex> lock(memory.mutex); memory.peak[card] = memory.used[card]; }
}
