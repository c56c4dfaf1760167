#include "runtime/device.h"

#include <tuple>

namespace dflash_trt
{
namespace
{

auto members(Device const& device) noexcept
{
    return std::tie(device.handle, device.major, device.minor, device.num_multiprocessors);
}

} // namespace

Device Device::current()
{
    CudaDriver const& driver = CudaDriver::get();
    Device device{};
    driver.check(driver.ctx_get_device(&device.handle), "cuCtxGetDevice");
    auto const read = [&](CUdevice_attribute attribute, int& value)
    { driver.check(driver.device_get_attribute(&value, attribute, device.handle), "cuDeviceGetAttribute"); };
    read(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device.major);
    read(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device.minor);
    read(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device.num_multiprocessors);
    return device;
}

bool Device::operator<(Device const& other) const noexcept
{
    return members(*this) < members(other);
}

bool Device::operator==(Device const& other) const noexcept
{
    return members(*this) == members(other);
}

} // namespace dflash_trt
