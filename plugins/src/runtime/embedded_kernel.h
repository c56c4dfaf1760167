// The kernels inside the library: a table that `python -m plugins.aot` writes, one row per variant and
// architecture, and the bytes of their cubins.
#pragma once

#include "runtime/arithmetic.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dflash_trt
{

class Values;

struct KernelArgument
{
    char const* name;
    char const* type;       // in Triton's words: "*bf16", "i32", "i64", "fp32"
    bool is_multiple_of_16; // the value or address; the compiler relied on it
};

struct KernelConstant
{
    char const* name;
    int64_t value;
};

struct Grid
{
    uint32_t x;
    uint32_t y;
    uint32_t z;
};

/// A compute capability, and whether its binaries run on it alone ("90a") or on later minor versions as well ("80").
struct Architecture
{
    int major;
    int minor;
    bool is_specific;

    [[nodiscard]] bool runs_on(int device_major, int device_minor) const noexcept;
    [[nodiscard]] std::string name() const; // "sm_90a"
};

struct EmbeddedKernel
{
    char const* variant; // unique in an architecture
    char const* kernel;  // the function in dflash_trt/kernels; its variants differ in types and constants
    char const* entry;   // in the cubin
    Architecture architecture;
    uint32_t num_threads;
    uint32_t shared_bytes;
    KernelArgument const* arguments; // after them, the compiler adds num_scratch_pointers, which are null
    size_t num_arguments;
    size_t num_scratch_pointers;
    KernelConstant const* constants;
    size_t num_constants;
    Grid (*grid)(Values const&);
    size_t offset; // of the cubin in embedded_bytes()
    size_t size;

    /// Throws Problem when the variant has no such constant.
    [[nodiscard]] int64_t constant(std::string_view name) const;
    /// Empty when the kernel has no such argument.
    [[nodiscard]] std::string_view type_of(std::string_view argument) const noexcept;
};

struct EmbeddedKernels
{
    EmbeddedKernel const* first;
    size_t count;
    unsigned char const* bytes;
    char const* manifest_sha256; // of the manifest that the table was made from

    [[nodiscard]] EmbeddedKernel const* begin() const noexcept { return first; }
    [[nodiscard]] EmbeddedKernel const* end() const noexcept { return first + count; }
    /// "sm_90a, sm_100a, sm_103a"
    [[nodiscard]] std::string architectures() const;
};

/// In the generated embedded_kernels.cpp.
EmbeddedKernels const& embedded_kernels() noexcept;

/// For generated grids. Throws Problem when an axis is outside what a launch can have.
Grid make_grid(int64_t x, int64_t y, int64_t z);

} // namespace dflash_trt
