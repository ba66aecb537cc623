// A fake CUDA device for a CPU build of torch. With it, fake tensors on "cuda" go through indexing, autograd's threads
// and optimizers; nothing is computed, and no memory is allocated.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Registry.h>

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  static c10::Device here() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, here()); }
};
}  // namespace
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
