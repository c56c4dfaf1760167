// The contract of plugins/README.md as data: names, orders and types of every plugin. Knows no TensorRT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace dflash_trt
{

constexpr char kNamespace[] = "dflash_trt";
constexpr char kVersion[] = "2";

enum class TensorType : int32_t
{
    kFloat, // F: float32, float16 or bfloat16, the same for all of a node
    kInt32,
    kInt64,
    kFloat32,
    kInt8, // bytes of any format
};

struct InputRule
{
    char const* name;
    TensorType type;
    int32_t rank;
};

struct OutputRule
{
    char const* name;
    TensorType type;
};

enum class FieldType : int32_t
{
    kInt32,
    kFloat32,
};

/// A scalar.
struct FieldRule
{
    char const* name;
    FieldType type;
    double min;
    double max;
};

/// A view of a constant array.
template <typename T>
struct Rules
{
    T const* first;
    int32_t count;

    constexpr Rules() noexcept : first(nullptr), count(0) {}
    template <size_t n>
    constexpr Rules(T const (&rules)[n]) noexcept : first(rules), count(static_cast<int32_t>(n))
    {
    } // NOLINT: a view

    [[nodiscard]] constexpr T const& operator[](int32_t i) const noexcept { return first[i]; }
    [[nodiscard]] constexpr T const* begin() const noexcept { return first; }
    [[nodiscard]] constexpr T const* end() const noexcept { return first + count; }
};

struct PluginContract
{
    char const* name;
    Rules<InputRule> inputs;
    Rules<OutputRule> outputs;
    Rules<FieldRule> fields;
};

extern PluginContract const kAttendPages;
extern PluginContract const kAttendDraft;
extern PluginContract const kWriteDraftContext;
extern PluginContract const kPreviousRows;
extern PluginContract const kSampleAndAccept;
extern PluginContract const kDraftTokens;
extern PluginContract const kExperts;
extern PluginContract const kGatedDelta;
extern PluginContract const kAttendLatents;
extern PluginContract const kAllReduce;
extern PluginContract const kAllGather;

/// All plugins, as JSON.
std::string describe_contract();

} // namespace dflash_trt
