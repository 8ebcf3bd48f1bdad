// A CUDA device guard and hooks that do nothing: autograd on fake CUDA tensors asks for them, and the CPU build of
// torch has none.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
constexpr auto kCuda = c10::DeviceType::CUDA;
struct Guard final : public c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kCuda, 0); }
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0)); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0)); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
static Guard guard;
struct Register { Register() { c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard); } };
static Register registered;
}
namespace at {
struct FakeCUDAHooks final : public CUDAHooksInterface {
  FakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCUDAHooks)
}
