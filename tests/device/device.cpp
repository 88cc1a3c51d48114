// An accelerator for tests on machines that have none. Its memory is the host's, so that the kernels of the CPU serve it.
// In all else it is as strict as CUDA:
//   * operands on two devices are refused; only a number on the CPU (0-dim) is welcome, where CUDA takes one too,
//   * each of its two devices draws from a generator of its own, and takes no generator and no state of the CPU,
//   * a copy to pinned memory with non_blocking=True is under way until something waits: until then the host reads nan,
//   * fresh memory holds nan,
//   * backward runs in a thread of the device,
//   * every point at which the host waits for the device is counted, and so is every tensor that it sends there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace at::autocast {  // its own header takes longer to compile than all of this file
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
thread_local int current = 0;
thread_local int serving = 0;  // a kernel of the CPU is at work for the device: what it copies is no transfer

struct Serving {
  Serving() { ++serving; }
  ~Serving() { --serving; }
};

c10::Device device_at(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// ---- what is counted, and what is under way ----

struct Copy {
  at::Tensor from, to;
};
std::mutex lock;
std::map<std::string, int64_t> waits;
int64_t uploads = 0;
std::vector<Copy> under_way;

void wait_for_the_device(const std::string& why) {
  std::vector<Copy> arriving;
  {
    std::lock_guard<std::mutex> guard(lock);
    ++waits[why];
    arriving.swap(under_way);
  }
  c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet(c10::DispatchKey::Python));
  at::NoGradGuard no_grad;
  for (auto& copy : arriving) copy.to.copy_(copy.from);
}

// ---- memory ----

struct Memory : c10::Allocator {
  static void* made(size_t size) {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size ? size : 1) == 0, "sim: out of memory");
    return data;
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

struct DeviceMemory final : Memory {
  c10::DataPtr allocate(size_t size) override {
    void* data = made(size);
    std::memset(data, 0xFF, size);  // nan, or -1: nobody may count on zeros
    return {data, data, &free, device_at(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
};
DeviceMemory memory;
REGISTER_ALLOCATOR(kSim, &memory);

std::set<const void*> pinned;
void unpin(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(data);
  }
  free(data);
}
struct PinnedMemory final : Memory {
  c10::DataPtr allocate(size_t size) override {
    void* data = made(size);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
};
PinnedMemory pinned_memory;

// ---- the current device, and its one stream ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const noexcept override { return only_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return only_stream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new char;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  void synchronizeStream(const c10::Stream&) const override { wait_for_the_device("stream"); }
  void synchronizeEvent(void*) const override { wait_for_the_device("event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_the_device("device"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers: for the same seed those of the CPU, so that results can be compared ----

constexpr int64_t kMark = 0x51D0;  // before each state: one of the CPU has none

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Generator(int index)
      : GeneratorImpl(device_at(index < 0 ? current : index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim: no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim: no offsets"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto own = inner.get_state();
    auto state = at::empty({own.numel() + 8}, at::TensorOptions(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &kMark, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, own.data_ptr(), own.numel());
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& given) override {
    at::Tensor state(const_cast<c10::TensorImpl&>(given).shallow_copy_and_detach(given.version_counter(), true));
    TORCH_CHECK(state.device().is_cpu() && state.scalar_type() == at::kByte, "RNG state must be a torch.ByteTensor");
    auto size = inner.get_state().numel();
    TORCH_CHECK(state.numel() == size + 8, "RNG state is wrong size");
    TORCH_CHECK(std::memcmp(state.data_ptr(), &kMark, 8) == 0, "RNG state is of another kind of device");
    inner.set_state(state.narrow(0, 8, size).clone());
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

at::Generator new_generator(int index) {
  at::Generator made(c10::make_intrusive<Generator>(index));
  made.set_current_seed(c10::default_rng_seed_val);
  return made;
}
at::Generator& inner_of(at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}
at::Generator& generator_of(int index) {
  static at::Generator all[kDevices] = {new_generator(0), new_generator(1)};
  return all[index < 0 ? current : index];
}

// ---- what torch asks of an accelerator ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_at(current).index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    current = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data) > 0;
  }
};
Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- making and copying tensors ----

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, for a kernel of the CPU
  if (!on_sim(tensor)) return tensor;
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "sim: no lazy conjugates");
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (!serving && to.device().is_cpu()) {
    if (non_blocking && to.is_pinned()) {
      if (to.is_non_overlapping_and_dense()) std::memset(to.data_ptr(), 0xFF, to.numel() * to.element_size());
      auto kept = at::empty_like(on_host(from)).copy_(on_host(from));
      std::lock_guard<std::mutex> guard(lock);
      under_way.push_back({kept, to});
      return to;
    }
    wait_for_the_device("copy to the host");
  } else if (!serving && from.device().is_cpu()) {
    std::lock_guard<std::mutex> guard(lock);
    ++uploads;
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  wait_for_the_device("item");
  return on_host(tensor).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
at::Tensor& set_nothing(at::Tensor& self) {
  at::Storage none(c10::Storage::use_byte_size_t(), 0, &memory, true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {length}, {});
}
at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void record_stream(at::Tensor&, at::Stream) {}

// ---- everything else: checked, then done by the CPU ----

const std::set<std::string> takes_indices_of_the_host{
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
const std::set<std::string> takes_no_numbers_of_the_host{
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::cat", "aten::embedding", "aten::gather", "aten::scatter",
    "aten::index_select", "aten::index_add", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_",
    "aten::_fused_adagrad_"};
const std::set<std::string> tells_the_host_something{
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_cholesky_ex", "aten::linalg_eig",
    "aten::_linalg_eigvals", "aten::linalg_lstsq", "aten::linalg_inv_ex", "aten::_linalg_solve_ex", "aten::bincount"};

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) look(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each) look(*each);
  }
}

void check_devices(const std::string& name, const std::vector<c10::IValue>& given) {
  const bool indices = takes_indices_of_the_host.count(name) > 0;
  const bool numbers = takes_no_numbers_of_the_host.count(name) == 0;
  std::optional<at::Device> first;
  for (const auto& value : given) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device().is_meta()) return;
      if (tensor.device().is_cpu() && (indices || (numbers && tensor.dim() == 0))) return;
      if (!first) first = tensor.device();
      TORCH_CHECK(*first == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *first, " and ", tensor.device(), "! (", name, ")");
    });
  }
}

int device_in(const std::vector<c10::IValue>& given) {
  int found = -1;
  for (const auto& value : given) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (found < 0 && on_sim(tensor)) found = tensor.device().index();
    });
    if (found < 0 && value.isDevice() && value.toDevice().type() == kSim) found = value.toDevice().index();
  }
  return found < 0 ? current : found;
}

void drawn_by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::Generator& own) {
  auto cpu = at::detail::getDefaultCPUGenerator();  // which the kernel asks: let it hold the state of the device meanwhile
  auto before = cpu.get_state();
  cpu.set_state(own.get_state());
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    cpu.set_state(before);
    throw;
  }
  own.set_state(cpu.get_state());
  cpu.set_state(before);
}

void serve(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& name = op.schema().name();
  const auto start = stack->size() - arguments.size();
  std::vector<c10::IValue> given;
  for (size_t each = 0; each < arguments.size(); ++each) {
    if (arguments[each].name() != "lr") given.push_back((*stack)[start + each]);  // which fused optimizers take on the CPU
  }
  check_devices(name, given);
  if (tells_the_host_something.count(name)) wait_for_the_device(name);
  const int index = device_in(given);
  c10::DeviceGuard guard(device_at(index));
  bool handed = false;
  for (size_t each = 0; each < arguments.size(); ++each) {
    auto& value = (*stack)[start + each];
    if (arguments[each].type()->str().find("Generator") == std::string::npos) continue;
    at::Generator generator = value.isNone() ? generator_of(index) : value.toGenerator();
    TORCH_CHECK(generator.device() == device_at(index), "Expected a 'sim:", index, "' device type for generator but found '",
                generator.device(), "'");
    value = inner_of(generator);
    handed = true;
  }
  Serving now;
  if (!handed && op.hasTag(at::Tag::nondeterministic_seeded)) return drawn_by_the_cpu(op, stack, inner_of(generator_of(index)));
  at::native::cpu_fallback(op, stack);
}

// torch has a front of its own for convolutions, which the fallback does not reach.
at::Tensor served(const at::Tensor& result, const at::Tensor& like) {
  Serving now;
  return result.defined() ? result.to(like.device()) : result;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  check_devices("convolution", {input, weight, bias.value_or(at::Tensor())});
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return served(at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed,
                                output_padding, groups), input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  check_devices("convolution_backward", {gradient, input, weight});
  std::vector<int64_t> sizes{gradient.size(1)};
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), sizes, stride, padding, dilation, transposed, output_padding,
      groups, mask);
  return {served(to_input, input), served(to_weight, input), served(to_bias, input)};
}

int64_t attention_as_written(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                             bool, std::optional<double>, bool) {
  return 0;
}

// ---- autocast ----

void cast_all(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType wanted) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto start = stack->size() - op.schema().arguments().size();
  for (size_t each = start; each < stack->size(); ++each) {
    auto& value = (*stack)[each];
    if (!value.isTensor() || !on_sim(value.toTensor())) continue;
    auto tensor = value.toTensor();
    if (tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) value = tensor.to(wanted);
  }
  op.callBoxed(stack);
}
void in_half(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_all(op, stack, at::autocast::get_autocast_dtype(kSim));
}
void in_single(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_all(op, stack, at::kFloat); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&serve>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", attention_as_written);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution",
                           "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_half>());
  for (const char* name : {"layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "nll_loss_nd", "mse_loss",
                           "cross_entropy_loss", "exp", "log", "rsqrt", "pow.Tensor_Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_single>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("waits", [] {
    std::lock_guard<std::mutex> guard(lock);
    return waits;
  });
  m.def("uploads", [] { return uploads; });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> guard(lock);
    waits.clear();
    uploads = 0;
  });
  m.def("synchronize", [] { wait_for_the_device("device"); });
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int index) { Guard().setDevice(device_at(index)); });
  m.def("default_generator", [](int index) { return generator_of(index); });
}
