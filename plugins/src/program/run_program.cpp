#include "program/run_program.h"

#include "launch_rules.h"
#include "program/workspace_layout.h"
#include "runtime/kernel_choice.h"
#include "runtime/problem.h"

#include <algorithm>
#include <iomanip>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace dflash_trt
{
namespace
{

bool holds(Expression condition, Values const& values)
{
    return condition == nullptr || condition(values) != 0;
}

/// 0.02, where std::to_string would say 0.020000 and nothing of what is smaller.
std::string shown(double number)
{
    std::ostringstream text;
    text << std::setprecision(std::numeric_limits<float>::max_digits10) << number;
    return text.str();
}

std::string shown(Shape const& shape)
{
    std::string sizes;
    for (int32_t i = 0; i < shape.rank; ++i)
    {
        sizes += (i > 0 ? ", " : "") + std::to_string(shape.sizes[static_cast<size_t>(i)]);
    }
    return "[" + sizes + "]";
}

void add_given(Program const& program, Node const& node, Values& values)
{
    values.integer("element_bytes", element_bytes(node.type))
        .integer("is_float32", node.type == FloatType::kFloat32 ? 1 : 0)
        .integer("float_type", static_cast<int64_t>(node.type));
    for (int32_t i = 0; i < program.fields.count; ++i)
    {
        FieldRule const& rule = program.fields[i];
        double const value = node.fields[static_cast<size_t>(i)];
        if (rule.type == FieldType::kInt32)
        {
            values.integer(rule.name, static_cast<int64_t>(value));
        }
        else
        {
            values.real(rule.name, static_cast<float>(value));
        }
    }
    for (int32_t i = 0; i < program.inputs.count; ++i)
    {
        char const* const name = program.inputs[i].name;
        values.pointer(name, TensorSlot{TensorSource::kInput, i, 0}).shape(name, node.shapes[static_cast<size_t>(i)]);
    }
    for (int32_t i = 0; i < program.outputs.count; ++i)
    {
        values.pointer(program.outputs[i].name, TensorSlot{TensorSource::kOutput, i, 0});
    }
    for (SizeRule const& axis : program.axes)
    {
        int64_t const size = axis.value(values);
        if (size < 1)
        {
            throw Problem(std::string("size ") + axis.name, "1 or more", std::to_string(size),
                "Shapes stand in plugins/README.md.");
        }
        values.integer(axis.name, size);
    }
}

void check_shapes(Program const& program, Node const& node, Values const& values, bool is_of_step)
{
    for (int32_t i = 0; i < program.inputs.count; ++i)
    {
        InputRule const& rule = program.inputs[i];
        Shape const& found = node.shapes[static_cast<size_t>(i)];
        Shape expected = found;
        for (int32_t axis = 0; axis < rule.axes.count; ++axis)
        {
            auto const& [size, is_of_step_alone] = rule.axes[axis];
            if (size != nullptr && (is_of_step || !is_of_step_alone))
            {
                expected.sizes[static_cast<size_t>(axis)] = size(values);
            }
        }
        if (holds(rule.is_read, values) && expected.sizes != found.sizes)
        {
            throw Problem(rule.name, shown(expected), shown(found), "Shapes stand in plugins/README.md.");
        }
    }
}

void check(Rules<CheckRule> const& checks, Values const& values)
{
    for (CheckRule const& rule : checks)
    {
        if (!holds(rule.holds, values))
        {
            throw Problem(rule.subject, rule.expected(values), rule.found(values), rule.hint);
        }
    }
}

/// Of a node whose shapes and fields go together.
Values values_of(Program const& program, Node const& node, int64_t num_multiprocessors, bool is_of_step)
{
    for (int32_t i = 0; i < program.fields.count; ++i)
    {
        check_field(program.fields[i], node.fields[static_cast<size_t>(i)]);
    }
    Values values;
    values.integer("num_multiprocessors", std::min(num_multiprocessors, launch_rules::MAX_MULTIPROCESSORS));
    add_given(program, node, values);
    check_shapes(program, node, values, is_of_step);
    check(program.checks, values);
    return values;
}

std::string_view pointer_of(PointerType type, Values const& values)
{
    if (type == PointerType::kFloat32)
    {
        return pointer_type(FloatType::kFloat32);
    }
    bool const is_fp8 = type == PointerType::kPages && values.integer_of("page_type") == 1;
    return is_fp8 ? kFloat8Pointer : pointer_type(static_cast<FloatType>(values.integer_of("float_type")));
}

KernelChoice choice_of(KernelRule const& rule, Values const& values)
{
    KernelChoice choice(rule.name);
    for (auto const& [argument, type] : rule.types)
    {
        choice.type(argument, pointer_of(type, values));
    }
    for (auto const& [name, match, value] : rule.constants)
    {
        switch (match)
        {
        case Match::kEqual: choice.equal(name, value(values)); break;
        case Match::kSized: choice.sized(name, value(values)); break;
        case Match::kAtLeast: choice.at_least(name, value(values)); break;
        }
    }
    return choice;
}

/// What a constant may be; `device` null: on any GPU.
std::set<int64_t> constants_of(SizeRule const& rule, Values const& values, Device const* device)
{
    KernelChoice const choice = choice_of(rule.kernel, values);
    std::set<int64_t> constants;
    for (EmbeddedKernel const* variant : device == nullptr ? choice.candidates() : choice.candidates(*device))
    {
        constants.insert(variant->constant(rule.constant));
    }
    return constants;
}

void add_sizes(Rules<SizeRule> const& sizes, Values& values, Device const& device)
{
    for (SizeRule const& rule : sizes)
    {
        if (rule.value != nullptr)
        {
            values.integer(rule.name, rule.value(values));
            continue;
        }
        std::set<int64_t> const constants = constants_of(rule, values, &device);
        auto const nearest =
            rule.nearest == nullptr ? constants.begin() : constants.lower_bound(rule.nearest(values));
        values.integer(rule.name, nearest != constants.end() ? *nearest : *constants.rbegin());
    }
}

/// Calls `then` with the sizes from `first` on: with those of each variant, where a step's shape chooses.
template <typename Then>
void for_each_choice(Rules<SizeRule> const& sizes, int32_t first, Values values, Then const& then)
{
    for (int32_t i = first; i < sizes.count; ++i)
    {
        SizeRule const& rule = sizes[i];
        if (rule.value != nullptr)
        {
            values.integer(rule.name, rule.value(values));
            continue;
        }
        for (int64_t const constant : constants_of(rule, values, nullptr))
        {
            Values chosen = values;
            for_each_choice(sizes, i + 1, chosen.integer(rule.name, constant), then);
        }
        return;
    }
    then(values);
}

void add_arguments(Rules<Argument> const& arguments, Values& values)
{
    for (auto const& [name, integer, real, pointer] : arguments)
    {
        if (integer != nullptr)
        {
            values.integer(name, integer(values));
        }
        else if (real != nullptr)
        {
            values.real(name, real(values));
        }
        else
        {
            values.pointer(name, pointer(values));
        }
    }
}

/// Scratch memory behind what `layout` has, and arguments.
void add_places(StageRule const& stage, Values& values, WorkspaceLayout& layout)
{
    for (auto const& [name, num_bytes] : stage.scratch)
    {
        values.pointer(name, TensorSlot{TensorSource::kWorkspace, 0, layout.add(num_bytes(values))});
    }
    add_arguments(stage.arguments, values);
}

void require(Rules<LaunchRule> const& launches, Values const& values)
{
    for (LaunchRule const& launch : launches)
    {
        if (!launch.is_fixed || holds(launch.when, values))
        {
            choice_of(launch.kernel, values).require();
        }
    }
}

/// `values` get what the stage defines.
void add_launches(StageRule const& stage, Values& values, WorkspaceLayout& layout, Device const& device,
    PreparedLaunches& launches)
{
    add_sizes(stage.sizes, values, device);
    check(stage.checks, values);
    add_places(stage, values, layout);
    for (LaunchRule const& launch : stage.launches)
    {
        if (holds(launch.when, values))
        {
            KernelChoice const choice = choice_of(launch.kernel, values);
            size_t const num_shared = values.count();
            add_arguments(launch.arguments, values);
            launches.emplace_back(choice.best(values, device), values, device);
            values.forget_from(num_shared);
        }
    }
}

/// `values` get the stage's sizes.
void load(StageRule const& stage, Values& values, Device const& device)
{
    add_sizes(stage.sizes, values, device);
    for (LaunchRule const& launch : stage.launches)
    {
        if (!launch.is_fixed || holds(launch.when, values))
        {
            static_cast<void>(choice_of(launch.kernel, values).candidates(device));
        }
    }
}

} // namespace

void check_field(FieldRule const& rule, double value)
{
    if (value >= rule.min && value <= rule.max) // NaN is refused, too
    {
        return;
    }
    bool const has_end = rule.type == FieldType::kInt32;
    bool const is_positive = rule.min == std::numeric_limits<float>::min();
    std::string const range = has_end ? shown(rule.min) + " to " + shown(rule.max)
                                      : is_positive ? "more than 0" : shown(rule.min) + " or more";
    throw Problem(std::string("field ") + rule.name, range, shown(value),
        "Build the plugin library from the same version of dflash-trt.");
}

size_t workspace_bytes(Program const& program, Node const& max)
{
    Values const values = values_of(program, max, launch_rules::MAX_MULTIPROCESSORS, false);
    size_t num_bytes = 0;
    auto const add = [&](StageRule const& stage, Values of_stage, size_t begin)
    {
        WorkspaceLayout layout(begin);
        add_places(stage, of_stage, layout);
        require(stage.launches, of_stage);
        num_bytes = std::max(num_bytes, layout.end());
        return std::pair(of_stage, layout.end());
    };
    for_each_choice(program.stage.sizes, 0, values,
        [&](Values const& sized)
        {
            auto const [placed, end] = add(program.stage, sized, 0);
            for (StageRule const& pass : program.passes)
            {
                for_each_choice(pass.sizes, 0, placed, [&, end = end](Values const& of_pass) { add(pass, of_pass, end); });
            }
        });
    return num_bytes;
}

PreparedLaunches prepare(Program const& program, Node const& node, Device const& device)
{
    Values values = values_of(program, node, device.num_multiprocessors, true);
    PreparedLaunches launches;
    WorkspaceLayout layout;
    add_launches(program.stage, values, layout, device, launches);
    for (StageRule const& pass : program.passes)
    {
        if (holds(pass.when, values))
        {
            Values of_pass = values;
            WorkspaceLayout own(layout.end());
            add_launches(pass, of_pass, own, device, launches);
        }
    }
    return launches;
}

void load_kernels(Program const& program, Node const& node, Device const& device)
{
    Values values = values_of(program, node, device.num_multiprocessors, true);
    load(program.stage, values, device);
    for (StageRule const& pass : program.passes)
    {
        Values of_pass = values;
        load(pass, of_pass, device);
    }
}

} // namespace dflash_trt
