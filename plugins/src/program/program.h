// Operations as data: the contract of plugins/README.md, sizes and launches. Knows no TensorRT. The tables are made of
// dflash_trt/kernels/programs by plugins.aot; what they mean stands in its program.py.
#pragma once

#include "runtime/call_tensors.h"
#include "runtime/values.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace dflash_trt
{

extern char const kNamespace[];
extern char const kVersion[];
extern char const kContract[]; // of all plugins, in JSON

using Pointer = std::optional<TensorSlot>;
using Expression = int64_t (*)(Values const&);
using RealExpression = float (*)(Values const&);
using PointerExpression = Pointer (*)(Values const&);
using Text = std::string (*)(Values const&);

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

enum class TensorType : int32_t
{
    kFloat, // F: float32, float16 or bfloat16, the same for all of a node
    kInt32,
    kInt64,
    kFloat32,
    kInt8, // bytes of any format
};

struct AxisRule
{
    Expression size; // null: any, as where a name is defined
    bool is_of_step; // holds for a step's shapes, not for the largest of each input
};

struct InputRule
{
    char const* name;
    TensorType type;
    Rules<AxisRule> axes;
    Expression is_read; // null: always
};

/// An axis of an input; `input` -1: none.
struct AxisPlace
{
    int32_t input;
    int32_t axis;
};

/// A constant, or a field, or an axis that may be divided by another.
struct Factor
{
    int64_t constant;
    char const* field;
    AxisPlace size;
    AxisPlace divisor;
};

using OutputAxis = Rules<Factor>; // their product

struct OutputRule
{
    char const* name;
    TensorType type;
    Rules<OutputAxis> axes;
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

struct CheckRule
{
    char const* subject;
    Expression holds;
    Text expected;
    Text found;
    char const* hint;
};

enum class PointerType : int32_t
{
    kNetwork, // F
    kFloat32,
    kPages, // F or FP8, as the field page_type says
};

struct TypeRule
{
    char const* argument;
    PointerType type;
};

enum class Match : int32_t
{
    kEqual,
    kSized, // equal, too, but another shape of step may need another one
    kAtLeast,
};

struct ConstantRule
{
    char const* name;
    Match match;
    Expression value;
};

struct KernelRule
{
    char const* name;
    Rules<TypeRule> types;
    Rules<ConstantRule> constants;
};

/// A value, or a constant of a kernel's variants.
struct SizeRule
{
    char const* name;
    Expression value;
    KernelRule kernel;
    char const* constant;
    Expression nearest; // null: all variants have the same
};

/// One of the three.
struct Argument
{
    char const* name;
    Expression integer;
    RealExpression real;
    PointerExpression pointer;
};

struct ScratchRule
{
    char const* name;
    Expression num_bytes;
};

struct LaunchRule
{
    KernelRule kernel;
    Rules<Argument> arguments;
    Expression when; // null: always
    bool is_fixed;   // fields alone decide it
};

struct StageRule
{
    Expression when; // null: always
    Rules<SizeRule> sizes;
    Rules<CheckRule> checks;
    Rules<ScratchRule> scratch;
    Rules<Argument> arguments;
    Rules<LaunchRule> launches;
};

struct Program
{
    char const* name;
    Rules<InputRule> inputs;
    Rules<OutputRule> outputs;
    Rules<FieldRule> fields;
    Rules<SizeRule> axes; // by name
    Rules<CheckRule> checks;
    StageRule stage;
    Rules<StageRule> passes;
};

extern Rules<Program const*> const kPrograms;

} // namespace dflash_trt
