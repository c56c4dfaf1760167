// PTX ISA, "Data Movement and Conversion Instructions: cvt" and "cvta".
#include <cmath>
#include <limits>

#include "decode.h"
#include "elementwise.h"
#include "numbers.h"

namespace software_gpu {
namespace {

constexpr auto kSame = [](auto a) { return a; };

template <class T>
constexpr auto kLow = [](uint64_t a) { return static_cast<T>(a); };

template <class R>
Handler from_integer(Type type, bool is_in_64_bits) {
    const bool is_signed = type.kind == 's';
    if (is_in_64_bits) {
        switch (type.bits) {
            case 8: return is_signed ? map<R, kLow<int8_t>, uint64_t> : map<R, kLow<uint8_t>, uint64_t>;
            case 16: return is_signed ? map<R, kLow<int16_t>, uint64_t> : map<R, kLow<uint16_t>, uint64_t>;
            case 32: return is_signed ? map<R, kLow<int32_t>, uint64_t> : map<R, kLow<uint32_t>, uint64_t>;
            default: return is_signed ? map<R, kSame, int64_t> : map<R, kSame, uint64_t>;
        }
    }
    switch (type.bits) {
        case 8: return is_signed ? map<R, kSame, int8_t> : map<R, kSame, uint8_t>;
        case 16: return is_signed ? map<R, kSame, int16_t> : map<R, kSame, uint16_t>;
        case 32: return is_signed ? map<R, kSame, int32_t> : map<R, kSame, uint32_t>;
        default: return is_signed ? map<R, kSame, int64_t> : map<R, kSame, uint64_t>;
    }
}

// A register wider than the type holds it extended: PTX ISA, "Operand Size Exceeding Instruction-Type Size".
constexpr auto kSigned8 = [](auto a) { return static_cast<int16_t>(static_cast<int8_t>(a)); };
Handler narrowed_signed(Type from) {
    return from.bits == 32 ? map<int16_t, kSigned8, uint32_t> : from.bits == 16 ? map<int16_t, kSigned8, uint16_t> : nullptr;
}

bool is_float(Type type) { return type.kind == 'f' || type.kind == 'g'; }

double number(uint64_t bits, Type type) {
    if (type.kind == 'g') return Bfloat16{static_cast<uint16_t>(bits)}.value();
    if (type.bits == 16) return Half{static_cast<uint16_t>(bits)}.value();
    if (type.bits == 32) return std::bit_cast<float>(static_cast<uint32_t>(bits));
    return std::bit_cast<double>(bits);
}

enum Rounding { kNearest, kZero, kDown, kUp };

double rounded(double value, int64_t rounding) {
    switch (rounding) {
        case kZero: return std::trunc(value);
        case kDown: return std::floor(value);
        case kUp: return std::ceil(value);
        default: return std::nearbyint(value);
    }
}

template <class T>
uint64_t clamped(double value) {  // to an integer; NaN is 0
    using Limits = std::numeric_limits<T>;
    if (std::isnan(value)) return 0;
    if (value <= static_cast<double>(Limits::min())) return static_cast<uint64_t>(Limits::min());
    if (value >= static_cast<double>(Limits::max())) return static_cast<uint64_t>(Limits::max());
    return static_cast<uint64_t>(static_cast<T>(value));
}

uint64_t as_integer(double value, Type type) {
    if (type.kind == 's') {
        switch (type.bits) {
            case 8: return clamped<int8_t>(value);
            case 16: return clamped<int16_t>(value);
            case 32: return clamped<int32_t>(value);
            default: return clamped<int64_t>(value);
        }
    }
    switch (type.bits) {
        case 8: return clamped<uint8_t>(value);
        case 16: return clamped<uint16_t>(value);
        case 32: return clamped<uint32_t>(value);
        default: return clamped<uint64_t>(value);
    }
}

// A double that is a float32, rounded towards zero instead.
float towards_zero(double value) {
    const float nearest = static_cast<float>(value);
    return std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? std::nextafter(nearest, 0.0f) : nearest;
}

uint64_t as_float(double value, Type type, int64_t rounding) {
    if (type.kind == 'g') {
        if (rounding == kZero && !std::isnan(value)) return std::bit_cast<uint32_t>(towards_zero(value)) >> 16;
        return to_bfloat16(static_cast<float>(value)).bits;
    }
    if (type.bits == 16) {
        const Half half = to_half(value);
        if (rounding == kZero && std::fabs(static_cast<double>(half.value())) > std::fabs(value)) return half.bits - 1;
        return half.bits;
    }
    if (type.bits == 32) return std::bit_cast<uint32_t>(rounding == kZero ? towards_zero(value) : static_cast<float>(value));
    return std::bit_cast<uint64_t>(value);
}

// Of which one side is a float. n: kind and bits of the source, of the result, integer rounding (-1: none), rounding of the
// result, ftz, sat, relu.
struct Conversion {
    Type from, to;
    int64_t to_whole, rounding;
    bool flushes, saturates, is_relu;
};
Conversion conversion_of(const Instruction& instruction) {
    const auto& n = instruction.n;
    return {{static_cast<char>(n[0]), static_cast<int>(n[1])}, {static_cast<char>(n[2]), static_cast<int>(n[3])}, n[4], n[5],
            (n[6] & 1) != 0, (n[6] & 2) != 0, (n[6] & 4) != 0};
}

int64_t integer_value(uint64_t bits, Type type) {
    const int unused = 64 - type.bits;
    return type.kind == 's' ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits << unused >> unused);
}

void convert(Warp& warp, const Instruction& instruction, Mask active) {
    const Conversion c = conversion_of(instruction);
    const Use &from = instruction.from[0], &to = instruction.to[0];
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        const uint64_t bits = from.num_words == 2 ? warp.lanes<uint64_t>(from)[lane] : warp.lanes<uint32_t>(from)[lane];
        uint64_t result = 0;
        if (is_float(c.from)) {
            double value = number(bits, c.from);
            if (c.flushes && c.from.bits == 32) value = flushed(static_cast<float>(value));
            if (c.is_relu && !(value > 0) && !std::isnan(value)) value = 0;
            if (c.to_whole >= 0) value = rounded(value, c.to_whole);
            if (c.saturates && is_float(c.to)) value = std::isnan(value) ? 0 : std::fmin(std::fmax(value, 0.0), 1.0);
            result = is_float(c.to) ? as_float(value, c.to, c.rounding) : as_integer(value, c.to);
        } else {
            const int64_t value = integer_value(bits, c.from);
            if (c.to.bits == 32 && c.to.kind == 'f') {  // once, from all 64 bits
                const float exact = c.from.kind == 's' ? static_cast<float>(value) : static_cast<float>(static_cast<uint64_t>(value));
                result = std::bit_cast<uint32_t>(exact);
            } else {
                result = as_float(c.from.kind == 's' ? static_cast<double>(value) : static_cast<double>(static_cast<uint64_t>(value)), c.to, c.rounding);
            }
        }
        if (to.num_words == 2) warp.lanes<uint64_t>(to)[lane] = result;
        else warp.lanes<uint32_t>(to)[lane] = static_cast<uint32_t>(c.to.bits < 32 ? result & ((1u << c.to.bits) - 1) : result);
    }
}

// ---- two small floats in a register: the first operand is the high half

constexpr auto kHalves = [](float high, float low) { return uint32_t{to_half(low).bits} | uint32_t{to_half(high).bits} << 16; };
constexpr auto kBfloats = [](float high, float low) { return uint32_t{to_bfloat16(low).bits} | uint32_t{to_bfloat16(high).bits} << 16; };
constexpr auto kRelu = [](float a) { return a > 0 || std::isnan(a) ? a : 0.0f; };
constexpr auto kHalvesRelu = [](float high, float low) { return kHalves(kRelu(high), kRelu(low)); };
constexpr auto kBfloatsRelu = [](float high, float low) { return kBfloats(kRelu(high), kRelu(low)); };
constexpr auto kE4m3FromFloats = [](float high, float low) { return static_cast<uint16_t>(kE4m3.code(low) | kE4m3.code(high) << 8); };
constexpr auto kE4m3FromHalves = [](uint32_t both) { return kE4m3FromFloats(Half{static_cast<uint16_t>(both >> 16)}.value(), Half{static_cast<uint16_t>(both)}.value()); };
constexpr auto kHalvesFromE4m3 = [](uint16_t both) { return kHalves(kE4m3.value(both >> 8), kE4m3.value(both & 0xff)); };
constexpr auto kHalvesFromE5m2 = [](uint16_t both) { return kHalves(e5m2_value(both >> 8), e5m2_value(both & 0xff)); };
constexpr auto kE2m1FromFloats = [](float high, float low) { return static_cast<uint8_t>(kE2m1.code(low) | kE2m1.code(high) << 4); };
constexpr auto kHalvesFromE2m1 = [](uint8_t both) { return kHalves(kE2m1.value(both >> 4), kE2m1.value(both & 0xf)); };
constexpr auto kTf32 = [](float a) { return to_tf32_away(a); };

bool decode_packed(Decoder& decoder, const std::string& to, const std::string& from) {
    Instruction& instruction = decoder.instruction();
    const auto operands = [&](int to_bits, int from_bits) {
        decoder.to(0, to_bits);
        for (size_t i = 1; i < decoder.num_operands(); ++i) decoder.from(i, from_bits);
    };
    const bool is_relu = decoder.has("relu"), is_nearest = decoder.has("rn");
    if (to == "tf32" && from == "f32" && decoder.has("rna")) {
        operands(32, 32);
        instruction.run = map<uint32_t, kTf32, float>;
    } else if (to == "f16x2" && from == "f32" && is_nearest) {
        operands(32, 32);
        instruction.run = is_relu ? map<uint32_t, kHalvesRelu, float, float> : map<uint32_t, kHalves, float, float>;
    } else if (to == "bf16x2" && from == "f32" && is_nearest) {
        operands(32, 32);
        instruction.run = is_relu ? map<uint32_t, kBfloatsRelu, float, float> : map<uint32_t, kBfloats, float, float>;
    } else if (to == "e4m3x2" && from == "f32" && !is_relu) {
        operands(16, 32);
        instruction.run = map<uint16_t, kE4m3FromFloats, float, float>;
    } else if (to == "e4m3x2" && from == "f16x2" && !is_relu) {
        operands(16, 32);
        instruction.run = map<uint16_t, kE4m3FromHalves, uint32_t>;
    } else if (to == "f16x2" && from == "e4m3x2" && !is_relu) {
        operands(32, 16);
        instruction.run = map<uint32_t, kHalvesFromE4m3, uint16_t>;
    } else if (to == "f16x2" && from == "e5m2x2" && !is_relu) {
        operands(32, 16);
        instruction.run = map<uint32_t, kHalvesFromE5m2, uint16_t>;
    } else if (to == "e2m1x2" && from == "f32" && !is_relu) {
        operands(8, 32);
        instruction.run = map<uint8_t, kE2m1FromFloats, float, float>;
    } else if (to == "f16x2" && from == "e2m1x2" && !is_relu) {
        operands(32, 8);
        instruction.run = map<uint32_t, kHalvesFromE2m1, uint8_t>;
    } else {
        return false;
    }
    return true;
}

void decode_cvt(Decoder& decoder) {
    const auto& opcode = decoder.statement().opcode;
    const std::string &to_word = opcode[opcode.size() - 2], &from_word = opcode.back();
    if (decode_packed(decoder, to_word, from_word)) return;
    const Type to = type_of(to_word), from = type_of(from_word);
    if (to.num_packed == 2 || from.num_packed == 2) decoder.refuse();
    Instruction& instruction = decoder.instruction();
    decoder.to(0, to.bits);
    decoder.allow_wider_registers();
    decoder.from(1, from.bits);
    const bool is_in_64_bits = instruction.from[0].num_words == 2;
    if (!is_float(to) && !is_float(from)) {
        if (decoder.has("sat")) decoder.refuse();
        const bool is_signed = to.kind == 's';
        switch (to.bits) {
            case 8: instruction.run = is_signed ? narrowed_signed(from) : from_integer<uint8_t>(from, is_in_64_bits); break;
            case 16: instruction.run = is_signed ? from_integer<int16_t>(from, is_in_64_bits) : from_integer<uint16_t>(from, is_in_64_bits); break;
            case 32: instruction.run = is_signed ? from_integer<int32_t>(from, is_in_64_bits) : from_integer<uint32_t>(from, is_in_64_bits); break;
            default: instruction.run = is_signed ? from_integer<int64_t>(from, is_in_64_bits) : from_integer<uint64_t>(from, is_in_64_bits);
        }
        if (!instruction.run) decoder.refuse();
        return;
    }
    for (const char* rounding : {"rm", "rp", "rs"})
        if (decoder.has(rounding)) decoder.refuse();
    int64_t to_whole = -1;
    if (decoder.has("rni")) to_whole = kNearest;
    if (decoder.has("rzi")) to_whole = kZero;
    if (decoder.has("rmi")) to_whole = kDown;
    if (decoder.has("rpi")) to_whole = kUp;
    instruction.n = {from.kind, from.bits, to.kind, to.bits, to_whole, decoder.has("rz") ? kZero : kNearest,
                     int64_t{decoder.has("ftz")} | int64_t{decoder.has("sat")} << 1 | int64_t{decoder.has("relu")} << 2};
    instruction.run = convert;
}

// Shared memory has addresses of its own here: a generic address of it would be one of global memory.
void decode_cvta(Decoder& decoder) {
    if (!decoder.has("global")) decoder.refuse("a generic address of this state space is not implemented");
    decoder.to(0, 64);
    decoder.from(1, 64);
    decoder.instruction().run = map<uint64_t, kSame, uint64_t>;
}

}  // namespace

void add_conversions(DecodeTable& table) {
    table["cvt"] = decode_cvt;
    table["cvta"] = decode_cvta;
}

}  // namespace software_gpu
