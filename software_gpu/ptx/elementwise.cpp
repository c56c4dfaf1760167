// Arithmetic, comparisons, logic and moves: PTX ISA, "Integer Arithmetic" to "Data Movement".
#include "elementwise.h"

#include <cmath>
#include <limits>

#include "decode.h"
#include "numbers.h"

namespace software_gpu {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

// ---- integers

constexpr auto kAdd = [](auto a, auto b) { return static_cast<Unsigned<decltype(a)>>(a) + static_cast<Unsigned<decltype(b)>>(b); };
constexpr auto kSub = [](auto a, auto b) { return static_cast<Unsigned<decltype(a)>>(a) - static_cast<Unsigned<decltype(b)>>(b); };
constexpr auto kMulLo = [](auto a, auto b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); };
constexpr auto kMadLo = [](auto a, auto b, auto c) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b) + static_cast<uint64_t>(c); };
constexpr auto kMulHi = [](auto a, auto b) { return static_cast<__int128>(a) * static_cast<__int128>(b) >> (8 * sizeof(a)); };
constexpr auto kMadHi = [](auto a, auto b, auto c) { return (static_cast<__int128>(a) * static_cast<__int128>(b) >> (8 * sizeof(a))) + c; };
constexpr auto kMulWide = [](auto a, auto b) { return static_cast<__int128>(a) * static_cast<__int128>(b); };
constexpr auto kMadWide = [](auto a, auto b, auto c) { return static_cast<__int128>(a) * static_cast<__int128>(b) + c; };
constexpr auto kMin = [](auto a, auto b) { return a < b ? a : b; };
constexpr auto kMax = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto kMaxRelu = [](auto a, auto b) { const auto most = a > b ? a : b; return most > 0 ? most : decltype(a){0}; };
constexpr auto kMinRelu = [](auto a, auto b) { const auto least = a < b ? a : b; return least > 0 ? least : decltype(a){0}; };
// A division by zero has no defined result; this is what GPUs give.
constexpr auto kDiv = [](auto a, auto b) {
    using T = decltype(a);
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(Unsigned<T>{0} - static_cast<Unsigned<T>>(a));
    return static_cast<T>(a / b);
};
constexpr auto kRem = [](auto a, auto b) {
    using T = decltype(a);
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
    return static_cast<T>(a % b);
};
constexpr auto kNeg = [](auto a) { return Unsigned<decltype(a)>{0} - static_cast<Unsigned<decltype(a)>>(a); };
constexpr auto kAbs = [](auto a) { return a < 0 ? static_cast<decltype(a)>(Unsigned<decltype(a)>{0} - static_cast<Unsigned<decltype(a)>>(a)) : a; };
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };
constexpr auto kNot = [](auto a) { return ~a; };
constexpr auto kShl = [](auto a, uint32_t by) { return by >= 8 * sizeof(a) ? decltype(a){0} : static_cast<decltype(a)>(a << by); };
constexpr auto kShr = [](auto a, uint32_t by) {
    if (by >= 8 * sizeof(a)) return a < 0 ? static_cast<decltype(a)>(-1) : decltype(a){0};
    return static_cast<decltype(a)>(a >> by);
};

template <auto F>
Handler binary_integer(Type type) {
    const bool is_signed = type.kind == 's';
    switch (type.bits) {
        case 8: return is_signed ? map<int8_t, F, int8_t, int8_t> : map<uint8_t, F, uint8_t, uint8_t>;
        case 16: return is_signed ? map<int16_t, F, int16_t, int16_t> : map<uint16_t, F, uint16_t, uint16_t>;
        case 32: return is_signed ? map<int32_t, F, int32_t, int32_t> : map<uint32_t, F, uint32_t, uint32_t>;
        default: return is_signed ? map<int64_t, F, int64_t, int64_t> : map<uint64_t, F, uint64_t, uint64_t>;
    }
}

template <auto F>
Handler ternary_integer(Type type) {
    const bool is_signed = type.kind == 's';
    switch (type.bits) {
        case 16: return is_signed ? map<int16_t, F, int16_t, int16_t, int16_t> : map<uint16_t, F, uint16_t, uint16_t, uint16_t>;
        case 32: return is_signed ? map<int32_t, F, int32_t, int32_t, int32_t> : map<uint32_t, F, uint32_t, uint32_t, uint32_t>;
        default: return is_signed ? map<int64_t, F, int64_t, int64_t, int64_t> : map<uint64_t, F, uint64_t, uint64_t, uint64_t>;
    }
}

template <auto F>
Handler unary_integer(Type type) {
    const bool is_signed = type.kind == 's';
    switch (type.bits) {
        case 16: return is_signed ? map<int16_t, F, int16_t> : map<uint16_t, F, uint16_t>;
        case 32: return is_signed ? map<int32_t, F, int32_t> : map<uint32_t, F, uint32_t>;
        default: return is_signed ? map<int64_t, F, int64_t> : map<uint64_t, F, uint64_t>;
    }
}

template <auto F>
Handler shift(Type type) {
    const bool is_signed = type.kind == 's';
    switch (type.bits) {
        case 16: return is_signed ? map<int16_t, F, int16_t, uint32_t> : map<uint16_t, F, uint16_t, uint32_t>;
        case 32: return is_signed ? map<int32_t, F, int32_t, uint32_t> : map<uint32_t, F, uint32_t, uint32_t>;
        default: return is_signed ? map<int64_t, F, int64_t, uint32_t> : map<uint64_t, F, uint64_t, uint32_t>;
    }
}

template <auto F>
Handler wide_product(Type type) {  // of two; the third of mad.wide is as wide as the result
    constexpr bool is_mad = std::is_invocable_v<decltype(F), int32_t, int32_t, int64_t>;
    const bool is_signed = type.kind == 's';
    if constexpr (is_mad) {
        if (type.bits == 16) return is_signed ? map<int32_t, F, int16_t, int16_t, int32_t> : map<uint32_t, F, uint16_t, uint16_t, uint32_t>;
        return is_signed ? map<int64_t, F, int32_t, int32_t, int64_t> : map<uint64_t, F, uint32_t, uint32_t, uint64_t>;
    } else {
        if (type.bits == 16) return is_signed ? map<int32_t, F, int16_t, int16_t> : map<uint32_t, F, uint16_t, uint16_t>;
        return is_signed ? map<int64_t, F, int32_t, int32_t> : map<uint64_t, F, uint32_t, uint32_t>;
    }
}

// ---- floats. Sums and products are rounded once, to nearest.

constexpr auto kFloatAdd = [](auto a, auto b) { return a + b; };
constexpr auto kFloatSub = [](auto a, auto b) { return a - b; };
constexpr auto kFloatMul = [](auto a, auto b) { return a * b; };
constexpr auto kFloatDiv = [](auto a, auto b) { return a / b; };
constexpr auto kFloatFma = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
template <class T>
bool is_less(T a, T b) {  // -0 is less than +0 here
    return a < b || (a == b && std::signbit(a) && !std::signbit(b));
}
constexpr auto kFloatMin = [](auto a, auto b) { return std::isnan(a) ? b : std::isnan(b) ? a : is_less(b, a) ? b : a; };
constexpr auto kFloatMax = [](auto a, auto b) { return std::isnan(a) ? b : std::isnan(b) ? a : is_less(a, b) ? b : a; };
constexpr auto kFloatMinNan = [](auto a, auto b) { return std::isnan(a) || std::isnan(b) ? std::numeric_limits<decltype(a)>::quiet_NaN() : is_less(b, a) ? b : a; };
constexpr auto kFloatMaxNan = [](auto a, auto b) { return std::isnan(a) || std::isnan(b) ? std::numeric_limits<decltype(a)>::quiet_NaN() : is_less(a, b) ? b : a; };
constexpr auto kXorSign = [](float magnitude, float a, float b) { return std::bit_cast<float>((std::bit_cast<uint32_t>(magnitude) & 0x7fffffffu) | ((std::bit_cast<uint32_t>(a) ^ std::bit_cast<uint32_t>(b)) & 0x80000000u)); };
constexpr auto kMaxXorSign = [](float a, float b) { return kXorSign(kFloatMax(std::fabs(a), std::fabs(b)), a, b); };
constexpr auto kMinXorSign = [](float a, float b) { return kXorSign(kFloatMin(std::fabs(a), std::fabs(b)), a, b); };

template <auto F>
constexpr auto kFlushed = [](auto... a) { return flushed(F(flushed(a)...)); };

template <auto F>
Handler binary_float(const Decoder& decoder, Type type) {
    if (type.bits == 64) return map<double, F, double, double>;
    return decoder.has("ftz") ? map<float, kFlushed<F>, float, float> : map<float, F, float, float>;
}
template <auto F>
Handler ternary_float(const Decoder& decoder, Type type) {
    if (type.bits == 64) return map<double, F, double, double, double>;
    return decoder.has("ftz") ? map<float, kFlushed<F>, float, float, float> : map<float, F, float, float, float>;
}
template <auto F>
Handler unary_float(const Decoder& decoder, Type type) {
    if (type.bits == 64) return map<double, F, double>;
    return decoder.has("ftz") ? map<float, kFlushed<F>, float> : map<float, F, float>;
}

// Halves and bfloat16, alone or two in a word: computed in double, rounded once.
template <class T>
T narrowed(double value);
template <>
Half narrowed<Half>(double value) { return to_half(value); }
template <>
Bfloat16 narrowed<Bfloat16>(double value) {
    // Through float32 with rounding to odd, so that the value is rounded once.
    float rounded = static_cast<float>(value);
    if (static_cast<double>(rounded) != value && std::isfinite(rounded)) {
        uint32_t bits = std::bit_cast<uint32_t>(rounded);
        if (!(bits & 1)) rounded = std::bit_cast<float>(std::fabs(static_cast<double>(rounded)) < std::fabs(value) ? bits + 1 : bits - 1);
    }
    return to_bfloat16(rounded);
}
template <class T, auto F>
constexpr auto kNarrow = [](auto... a) -> uint16_t { return narrowed<T>(F(static_cast<double>(T{a}.value())...)).bits; };
template <class T, auto F>
constexpr auto kNarrowPair = [](auto... a) -> uint32_t {
    return uint32_t{kNarrow<T, F>(static_cast<uint16_t>(a)...)} | uint32_t{kNarrow<T, F>(static_cast<uint16_t>(a >> 16)...)} << 16;
};
template <auto F, int kNumArguments>
Handler narrow(Type type) {
    if constexpr (kNumArguments == 1) {
        if (type.num_packed == 2) return type.kind == 'g' ? map<uint32_t, kNarrowPair<Bfloat16, F>, uint32_t> : map<uint32_t, kNarrowPair<Half, F>, uint32_t>;
        return type.kind == 'g' ? map<uint16_t, kNarrow<Bfloat16, F>, uint16_t> : map<uint16_t, kNarrow<Half, F>, uint16_t>;
    } else if constexpr (kNumArguments == 2) {
        if (type.num_packed == 2) return type.kind == 'g' ? map<uint32_t, kNarrowPair<Bfloat16, F>, uint32_t, uint32_t> : map<uint32_t, kNarrowPair<Half, F>, uint32_t, uint32_t>;
        return type.kind == 'g' ? map<uint16_t, kNarrow<Bfloat16, F>, uint16_t, uint16_t> : map<uint16_t, kNarrow<Half, F>, uint16_t, uint16_t>;
    } else {
        if (type.num_packed == 2) return type.kind == 'g' ? map<uint32_t, kNarrowPair<Bfloat16, F>, uint32_t, uint32_t, uint32_t> : map<uint32_t, kNarrowPair<Half, F>, uint32_t, uint32_t, uint32_t>;
        return type.kind == 'g' ? map<uint16_t, kNarrow<Bfloat16, F>, uint16_t, uint16_t, uint16_t> : map<uint16_t, kNarrow<Half, F>, uint16_t, uint16_t, uint16_t>;
    }
}

// Two float32 in 64 bits (Blackwell).
template <auto F>
constexpr auto kFloatPair = [](auto... a) -> uint64_t {
    const float low = F(std::bit_cast<float>(static_cast<uint32_t>(a))...);
    const float high = F(std::bit_cast<float>(static_cast<uint32_t>(a >> 32))...);
    return std::bit_cast<uint32_t>(low) | uint64_t{std::bit_cast<uint32_t>(high)} << 32;
};

// Two 16-bit integers in a word.
template <auto F, class T>
constexpr auto kShortPair = [](uint32_t a, uint32_t b) -> uint32_t {
    const auto low = static_cast<uint16_t>(F(static_cast<T>(a), static_cast<T>(b)));
    const auto high = static_cast<uint16_t>(F(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return low | uint32_t{high} << 16;
};

bool is_narrow(Type type) { return type.kind == 'g' || (type.kind == 'f' && type.bits == 16); }
int storage_bits(Type type) { return type.bits * type.num_packed; }

Type last_type(const Decoder& decoder) { return type_of(decoder.statement().opcode.back()); }

void require_nearest(const Decoder& decoder) {
    for (const char* rounding : {"rz", "rm", "rp", "sat"})
        if (decoder.has(rounding)) decoder.refuse();
}

void set_operands(Decoder& decoder, int bits, size_t num_sources, int bits_of_result = 0) {
    const auto& opcode = decoder.statement().opcode;
    if (decoder.num_operands() != num_sources + 1) throw Fault("another number of operands is expected");
    if (opcode.size() > 2 && is_type(opcode[opcode.size() - 2])) decoder.refuse("arguments of two types");
    decoder.to(0, bits_of_result ? bits_of_result : bits);
    for (size_t i = 1; i <= num_sources; ++i) decoder.from(i, bits);
}

// PTX ISA, "Mixed Precision Floating Point Instructions" (Blackwell): all arguments but the last are narrow, and exact in
// float32.
bool is_mixed(const Decoder& decoder) {
    const auto& opcode = decoder.statement().opcode;
    return opcode.size() > 2 && opcode[opcode.size() - 2] == "f32" && is_narrow(last_type(decoder));
}
template <auto F, class... T>
constexpr auto kMixed = [](std::conditional_t<true, uint16_t, T>... a, float last) { return F(T{a}.value()..., last); };

template <auto F, class... Narrow>
void decode_mixed(Decoder& decoder) {
    require_nearest(decoder);
    if (decoder.num_operands() != sizeof...(Narrow) + 2) decoder.refuse();
    decoder.to(0, 32);
    for (size_t i = 1; i <= sizeof...(Narrow); ++i) decoder.from(i, 16);
    decoder.from(sizeof...(Narrow) + 1, 32);
    decoder.instruction().run = map<float, kMixed<F, Narrow...>, std::conditional_t<true, uint16_t, Narrow>..., float>;
}

template <auto kInteger, auto kFloat>
void decode_binary(Decoder& decoder) {
    const Type type = last_type(decoder);
    if (is_mixed(decoder)) return type.kind == 'g' ? decode_mixed<kFloat, Bfloat16>(decoder) : decode_mixed<kFloat, Half>(decoder);
    require_nearest(decoder);
    set_operands(decoder, storage_bits(type), 2);
    Handler& run = decoder.instruction().run;
    if (is_narrow(type)) {
        run = narrow<kFloat, 2>(type);
    } else if (type.kind == 'f') {
        run = type.num_packed == 2 ? map<uint64_t, kFloatPair<kFloat>, uint64_t, uint64_t> : binary_float<kFloat>(decoder, type);
    } else if (type.num_packed == 2) {
        run = type.kind == 's' ? map<uint32_t, kShortPair<kInteger, int16_t>, uint32_t, uint32_t> : map<uint32_t, kShortPair<kInteger, uint16_t>, uint32_t, uint32_t>;
    } else {
        run = binary_integer<kInteger>(type);
    }
}

template <auto kFloat>
constexpr auto kOfThree = [](float a, float b, float c) { return kFloat(kFloat(a, b), c); };

template <auto kFloat, auto kFloatNan>
void decode_extremum_of_three(Decoder& decoder) {  // Blackwell
    if (!(last_type(decoder) == Type{'f', 32}) || decoder.has("abs") || decoder.has("xorsign")) decoder.refuse("three arguments of this type");
    set_operands(decoder, 32, 3);
    decoder.instruction().run = decoder.has("NaN") ? ternary_float<kOfThree<kFloatNan>>(decoder, {'f', 32}) : ternary_float<kOfThree<kFloat>>(decoder, {'f', 32});
}

template <auto kInteger, auto kRelu, auto kFloat, auto kFloatNan, auto kFloatXorSign>
void decode_extremum(Decoder& decoder) {
    const Type type = last_type(decoder);
    if (decoder.num_operands() == 4) return decode_extremum_of_three<kFloat, kFloatNan>(decoder);
    if (decoder.has("relu") && type == Type{'s', 32}) {
        set_operands(decoder, 32, 2);
        decoder.instruction().run = map<int32_t, kRelu, int32_t, int32_t>;
    } else if (decoder.has("xorsign")) {
        set_operands(decoder, 32, 2);
        decoder.instruction().run = map<float, kFloatXorSign, float, float>;
    } else if (decoder.has("relu") || decoder.has("abs")) {
        decoder.refuse();
    } else if (decoder.has("NaN")) {
        decode_binary<kInteger, kFloatNan>(decoder);
    } else {
        decode_binary<kInteger, kFloat>(decoder);
    }
}

void decode_mul(Decoder& decoder) {
    const Type type = last_type(decoder);
    Handler& run = decoder.instruction().run;
    if (decoder.has("wide")) {
        set_operands(decoder, type.bits, 2, 2 * type.bits);
        run = wide_product<kMulWide>(type);
    } else if (decoder.has("hi")) {
        set_operands(decoder, type.bits, 2);
        run = binary_integer<kMulHi>(type);
    } else {
        decode_binary<kMulLo, kFloatMul>(decoder);
    }
}

void decode_mad(Decoder& decoder) {
    const Type type = last_type(decoder);
    Handler& run = decoder.instruction().run;
    if (type.kind == 'f' || type.kind == 'g') decoder.refuse("mad of floats");
    if (decoder.has("wide")) {
        decoder.to(0, 2 * type.bits);
        decoder.from(1, type.bits);
        decoder.from(2, type.bits);
        decoder.from(3, 2 * type.bits);
        run = wide_product<kMadWide>(type);
    } else {
        set_operands(decoder, type.bits, 3);
        run = decoder.has("hi") ? ternary_integer<kMadHi>(type) : ternary_integer<kMadLo>(type);
    }
}

constexpr auto kFmaRelu = [](auto a, auto b, auto c) { const auto sum = std::fma(a, b, c); return sum > 0 || std::isnan(sum) ? sum : decltype(sum){0}; };

void decode_fma(Decoder& decoder) {
    const Type type = last_type(decoder);
    if (is_mixed(decoder)) return type.kind == 'g' ? decode_mixed<kFloatFma, Bfloat16, Bfloat16>(decoder) : decode_mixed<kFloatFma, Half, Half>(decoder);
    require_nearest(decoder);
    set_operands(decoder, storage_bits(type), 3);
    Handler& run = decoder.instruction().run;
    if (decoder.has("relu")) {
        if (!is_narrow(type)) decoder.refuse();
        run = narrow<kFmaRelu, 3>(type);
    } else if (is_narrow(type)) {
        run = narrow<kFloatFma, 3>(type);
    } else if (type.num_packed == 2) {
        run = map<uint64_t, kFloatPair<kFloatFma>, uint64_t, uint64_t, uint64_t>;
    } else {
        run = ternary_float<kFloatFma>(decoder, type);
    }
}

constexpr auto kFloatNeg = [](auto a) { return -a; };
constexpr auto kFloatAbs = [](auto a) { return std::fabs(a); };
constexpr auto kExp2 = [](auto a) { return std::exp2(a); };
constexpr auto kLog2 = [](auto a) { return std::log2(a); };
constexpr auto kReciprocal = [](auto a) { return 1 / a; };
constexpr auto kRsqrt = [](auto a) { return static_cast<decltype(a)>(1 / std::sqrt(static_cast<double>(a))); };
constexpr auto kSqrt = [](auto a) { return std::sqrt(a); };
constexpr auto kSin = [](auto a) { return std::sin(a); };
constexpr auto kCos = [](auto a) { return std::cos(a); };
constexpr auto kTanh = [](auto a) { return std::tanh(a); };

template <auto F>
void decode_unary_float(Decoder& decoder) {
    const Type type = last_type(decoder);
    require_nearest(decoder);
    set_operands(decoder, storage_bits(type), 1);
    decoder.instruction().run = is_narrow(type) ? narrow<F, 1>(type) : unary_float<F>(decoder, type);
}

template <auto kInteger, auto kFloat>
void decode_sign(Decoder& decoder) {
    const Type type = last_type(decoder);
    if (type.kind == 'f' || type.kind == 'g') return decode_unary_float<kFloat>(decoder);
    set_operands(decoder, type.bits, 1);
    decoder.instruction().run = unary_integer<kInteger>(type);
}

// ---- logic, of numbers and predicates

template <int kKind>  // 0 and, 1 or, 2 xor, 3 not
void predicate_logic(Warp& warp, const Instruction& instruction, Mask active) {
    const Mask a = warp.predicate(instruction.from[0]);
    Mask value = ~a;
    if constexpr (kKind < 3) {
        const Mask b = warp.predicate(instruction.from[1]);
        // One argument may decide alone.
        const Mask a_unset = warp.undefined_lanes(instruction.from[0]), b_unset = warp.undefined_lanes(instruction.from[1]);
        if constexpr (kKind == 0) warp.undefined &= (a_unset | a) & (b_unset | b);
        if constexpr (kKind == 1) warp.undefined &= (a_unset | ~a) & (b_unset | ~b);
        value = kKind == 0 ? (a & b) : kKind == 1 ? (a | b) : (a ^ b);
    }
    warp.set_predicate(instruction.to[0], value, active);
}

template <int kKind, auto F>
void decode_logic(Decoder& decoder) {
    const Type type = last_type(decoder);
    if (type.kind == 'p') {
        set_operands(decoder, 1, kKind < 3 ? 2 : 1);
        decoder.instruction().run = predicate_logic<kKind>;
        return;
    }
    set_operands(decoder, type.bits, kKind < 3 ? 2 : 1);
    if constexpr (kKind < 3) {
        decoder.instruction().run = binary_integer<F>({'u', type.bits});
    } else {
        decoder.instruction().run = unary_integer<F>({'u', type.bits});
    }
}

template <auto F>
void decode_shift(Decoder& decoder) {
    const Type type = last_type(decoder);
    decoder.to(0, type.bits);
    decoder.from(1, type.bits);
    decoder.from(2, 32);
    decoder.instruction().run = shift<F>(type.kind == 'b' ? Type{'u', type.bits} : type);
}

constexpr auto kFunnelLeftWrap = [](uint32_t low, uint32_t high, uint32_t by) { const uint64_t both = low | uint64_t{high} << 32; return static_cast<uint32_t>(both << (by & 31) >> 32); };
constexpr auto kFunnelRightWrap = [](uint32_t low, uint32_t high, uint32_t by) { const uint64_t both = low | uint64_t{high} << 32; return static_cast<uint32_t>(both >> (by & 31)); };
constexpr auto kFunnelLeftClamp = [](uint32_t low, uint32_t high, uint32_t by) { const uint64_t both = low | uint64_t{high} << 32; return by >= 32 ? low : static_cast<uint32_t>(both << by >> 32); };
constexpr auto kFunnelRightClamp = [](uint32_t low, uint32_t high, uint32_t by) { const uint64_t both = low | uint64_t{high} << 32; return by >= 32 ? high : static_cast<uint32_t>(both >> by); };

void decode_funnel_shift(Decoder& decoder) {
    set_operands(decoder, 32, 3);
    Handler& run = decoder.instruction().run;
    if (decoder.has("l")) {
        run = decoder.has("wrap") ? map<uint32_t, kFunnelLeftWrap, uint32_t, uint32_t, uint32_t> : map<uint32_t, kFunnelLeftClamp, uint32_t, uint32_t, uint32_t>;
    } else {
        run = decoder.has("wrap") ? map<uint32_t, kFunnelRightWrap, uint32_t, uint32_t, uint32_t> : map<uint32_t, kFunnelRightClamp, uint32_t, uint32_t, uint32_t>;
    }
}

template <class T>
T bit_field(T value, uint32_t start, uint32_t length) {  // PTX ISA, "bfe"
    constexpr int kMsb = 8 * sizeof(T) - 1;
    const int first = start & 0xff, count = length & 0xff;
    const bool is_negative = std::is_signed_v<T> && count && (static_cast<Unsigned<T>>(value) >> std::min(first + count - 1, kMsb) & 1);
    Unsigned<T> result = 0;
    for (int i = 0; i <= kMsb; ++i) {
        const bool bit = i < count && first + i <= kMsb ? (static_cast<Unsigned<T>>(value) >> (first + i) & 1) : is_negative;
        result |= static_cast<Unsigned<T>>(bit) << i;
    }
    return static_cast<T>(result);
}
constexpr auto kBitField = [](auto value, uint32_t start, uint32_t length) { return bit_field(value, start, length); };
void decode_bfe(Decoder& decoder) {
    const Type type = last_type(decoder);
    decoder.to(0, type.bits);
    decoder.from(1, type.bits);
    decoder.from(2, 32);
    decoder.from(3, 32);
    Handler& run = decoder.instruction().run;
    if (type.bits == 32) run = type.kind == 's' ? map<int32_t, kBitField, int32_t, uint32_t, uint32_t> : map<uint32_t, kBitField, uint32_t, uint32_t, uint32_t>;
    else run = type.kind == 's' ? map<int64_t, kBitField, int64_t, uint32_t, uint32_t> : map<uint64_t, kBitField, uint64_t, uint32_t, uint32_t>;
}

constexpr auto kInsert = [](uint32_t a, uint32_t b, uint32_t start, uint32_t length) {
    uint32_t result = b;
    for (uint32_t i = 0; i < (length & 0xff) && (start & 0xff) + i < 32; ++i) result = (result & ~(1u << ((start & 0xff) + i))) | ((a >> i & 1) << ((start & 0xff) + i));
    return result;
};
void decode_bfi(Decoder& decoder) {
    if (last_type(decoder).bits != 32) decoder.refuse();
    set_operands(decoder, 32, 4);
    decoder.instruction().run = map<uint32_t, kInsert, uint32_t, uint32_t, uint32_t, uint32_t>;
}

constexpr auto kPermute = [](uint32_t a, uint32_t b, uint32_t selector) {  // PTX ISA, "prmt", default mode
    const uint64_t both = a | uint64_t{b} << 32;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t choice = selector >> (4 * i) & 0xf;
        uint32_t byte = both >> (8 * (choice & 7)) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
};
void decode_prmt(Decoder& decoder) {
    if (decoder.statement().opcode.size() != 2) decoder.refuse();
    set_operands(decoder, 32, 3);
    decoder.instruction().run = map<uint32_t, kPermute, uint32_t, uint32_t, uint32_t>;
}

void lop3(Warp& warp, const Instruction& instruction, Mask active) {
    const auto* a = warp.lanes<uint32_t>(instruction.from[0]);
    const auto* b = warp.lanes<uint32_t>(instruction.from[1]);
    const auto* c = warp.lanes<uint32_t>(instruction.from[2]);
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        uint32_t result = 0;
        for (int row = 0; row < 8; ++row)
            if (instruction.n[0] >> row & 1) result |= (row & 4 ? a[lane] : ~a[lane]) & (row & 2 ? b[lane] : ~b[lane]) & (row & 1 ? c[lane] : ~c[lane]);
        warp.put<uint32_t>(instruction.to[0], lane, result);
    }
}
void decode_lop3(Decoder& decoder) {
    decoder.to(0, 32);
    for (size_t i = 1; i <= 3; ++i) decoder.from(i, 32);
    decoder.instruction().n[0] = static_cast<int64_t>(decoder.operand(4).number);
    decoder.instruction().run = lop3;
}

constexpr auto kLeadingZeros = [](auto a) { return static_cast<uint32_t>(std::countl_zero(a)); };
constexpr auto kPopulation = [](auto a) { return static_cast<uint32_t>(std::popcount(a)); };
constexpr auto kReversed = [](auto a) { decltype(a) result = 0; for (size_t i = 0; i < 8 * sizeof(a); ++i) result |= (a >> i & 1) << (8 * sizeof(a) - 1 - i); return result; };
template <auto F>
void decode_count(Decoder& decoder) {
    const int bits = last_type(decoder).bits;
    decoder.to(0, 32);
    decoder.from(1, bits);
    decoder.instruction().run = bits == 32 ? Handler{map<uint32_t, F, uint32_t>} : Handler{map<uint32_t, F, uint64_t>};
}
void decode_brev(Decoder& decoder) {
    const int bits = last_type(decoder).bits;
    set_operands(decoder, bits, 1);
    decoder.instruction().run = bits == 32 ? Handler{map<uint32_t, kReversed, uint32_t>} : Handler{map<uint64_t, kReversed, uint64_t>};
}
constexpr auto kFindTop = [](uint32_t a) { return a ? 31u - static_cast<uint32_t>(std::countl_zero(a)) : ~0u; };
void decode_bfind(Decoder& decoder) {
    if (!(last_type(decoder) == Type{'u', 32}) || decoder.has("shiftamt")) decoder.refuse();
    set_operands(decoder, 32, 1);
    decoder.instruction().run = map<uint32_t, kFindTop, uint32_t>;
}

// ---- comparisons

enum Combine { kNone, kWithAnd, kWithOr, kWithXor };

// to: p [, not p]; from: a, b [, c]; n[0]: Combine.
template <class T, auto F>
void compare(Warp& warp, const Instruction& instruction, Mask active) {
    Mask value = 0;
    for (int lane = 0; lane < kLanes; ++lane) value |= Mask{F(warp.get<T>(instruction.from[0], lane), warp.get<T>(instruction.from[1], lane))} << lane;
    Mask reverse = ~value;
    if (instruction.n[0] != kNone) {
        const Mask other = warp.predicate(instruction.from[2]);
        const auto combine = [&](Mask mask) { return instruction.n[0] == kWithAnd ? mask & other : instruction.n[0] == kWithOr ? mask | other : mask ^ other; };
        value = combine(value);
        reverse = combine(reverse);
    }
    warp.set_predicate(instruction.to[0], value, active);
    if (instruction.to.size() > 1) warp.set_predicate(instruction.to[1], reverse, active);
}

constexpr auto kEq = [](auto a, auto b) { return a == b; };
constexpr auto kNe = [](auto a, auto b) { return a != b; };
constexpr auto kLt = [](auto a, auto b) { return a < b; };
constexpr auto kLe = [](auto a, auto b) { return a <= b; };
constexpr auto kGt = [](auto a, auto b) { return a > b; };
constexpr auto kGe = [](auto a, auto b) { return a >= b; };

template <class T>
double number(T value) {
    if constexpr (std::is_floating_point_v<T>) return value;
    else return value.value();
}
template <class T, auto F>
constexpr auto kOrdered = [](T a, T b) { return !std::isnan(number(a)) && !std::isnan(number(b)) && F(number(a), number(b)); };
template <class T, auto F>
constexpr auto kUnordered = [](T a, T b) { return std::isnan(number(a)) || std::isnan(number(b)) || F(number(a), number(b)); };
constexpr auto kAreNumbers = [](auto a, auto b) { return !std::isnan(number(a)) && !std::isnan(number(b)); };
constexpr auto kAnyNan = [](auto a, auto b) { return std::isnan(number(a)) || std::isnan(number(b)); };

template <class T>
Handler integer_comparison(const std::string& word) {
    if (word == "eq") return compare<T, kEq>;
    if (word == "ne") return compare<T, kNe>;
    if (word == "lt" || word == "lo") return compare<T, kLt>;
    if (word == "le" || word == "ls") return compare<T, kLe>;
    if (word == "gt" || word == "hi") return compare<T, kGt>;
    if (word == "ge" || word == "hs") return compare<T, kGe>;
    throw Fault("no such comparison");
}

template <class T>
Handler float_comparison(const std::string& word) {
    if (word == "eq") return compare<T, kOrdered<T, kEq>>;
    if (word == "ne") return compare<T, kOrdered<T, kNe>>;
    if (word == "lt") return compare<T, kOrdered<T, kLt>>;
    if (word == "le") return compare<T, kOrdered<T, kLe>>;
    if (word == "gt") return compare<T, kOrdered<T, kGt>>;
    if (word == "ge") return compare<T, kOrdered<T, kGe>>;
    if (word == "equ") return compare<T, kUnordered<T, kEq>>;
    if (word == "neu") return compare<T, kUnordered<T, kNe>>;
    if (word == "ltu") return compare<T, kUnordered<T, kLt>>;
    if (word == "leu") return compare<T, kUnordered<T, kLe>>;
    if (word == "gtu") return compare<T, kUnordered<T, kGt>>;
    if (word == "geu") return compare<T, kUnordered<T, kGe>>;
    if (word == "num") return compare<T, kAreNumbers>;
    if (word == "nan") return compare<T, kAnyNan>;
    throw Fault("no such comparison");
}


void decode_setp(Decoder& decoder) {
    const Type type = last_type(decoder);
    const std::string& word = decoder.statement().opcode[1];
    Instruction& instruction = decoder.instruction();
    const Operand& result = decoder.operand(0);
    if (result.kind == Operand::Kind::kPair) {
        for (const Operand& part : result.parts) instruction.to.push_back(decoder.use(part, 1));
    } else {
        decoder.to(0, 1);
    }
    decoder.from(1, type.bits);
    decoder.from(2, type.bits);
    if (decoder.num_operands() == 4) {
        decoder.from(3, 1);
        instruction.n[0] = decoder.has("and") ? kWithAnd : decoder.has("or") ? kWithOr : kWithXor;
    }
    const bool is_signed = type.kind == 's';
    if (is_narrow(type)) {
        instruction.run = type.kind == 'g' ? float_comparison<Bfloat16>(word) : float_comparison<Half>(word);
    } else if (type.kind == 'f') {
        instruction.run = type.bits == 64 ? float_comparison<double>(word) : float_comparison<float>(word);
    } else if (type.bits == 16) {
        instruction.run = is_signed ? integer_comparison<int16_t>(word) : integer_comparison<uint16_t>(word);
    } else if (type.bits == 32) {
        instruction.run = is_signed ? integer_comparison<int32_t>(word) : integer_comparison<uint32_t>(word);
    } else {
        instruction.run = is_signed ? integer_comparison<int64_t>(word) : integer_comparison<uint64_t>(word);
    }
}

template <class T>
void select(Warp& warp, const Instruction& instruction, Mask active) {
    const Mask chosen = warp.predicate(instruction.from[2]);
    const Mask yes_unset = warp.undefined_lanes(instruction.from[0]), no_unset = warp.undefined_lanes(instruction.from[1]);
    warp.undefined &= warp.undefined_lanes(instruction.from[2]) | (yes_unset & chosen) | (no_unset & ~chosen);
    const auto* yes = warp.lanes<T>(instruction.from[0]);
    const auto* no = warp.lanes<T>(instruction.from[1]);
    auto* to = warp.lanes<T>(instruction.to[0]);
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) to[lane] = chosen >> lane & 1 ? yes[lane] : no[lane];
}
void decode_selp(Decoder& decoder) {
    const int bits = last_type(decoder).bits * last_type(decoder).num_packed;
    decoder.to(0, bits);
    decoder.from(1, bits);
    decoder.from(2, bits);
    decoder.from(3, 1);
    decoder.instruction().run = bits == 64 ? select<uint64_t> : select<uint32_t>;
}

// ---- moves

template <class T>
void move(Warp& warp, const Instruction& instruction, Mask active) {
    const auto* from = warp.lanes<T>(instruction.from[0]);
    auto* to = warp.lanes<T>(instruction.to[0]);
    for (int lane = 0; lane < kLanes; ++lane)
        if (active >> lane & 1) to[lane] = from[lane];
}
void move_predicate(Warp& warp, const Instruction& instruction, Mask active) {
    warp.set_predicate(instruction.to[0], warp.predicate(instruction.from[0]), active);
}

uint64_t raw(Warp& warp, const Use& use, int lane) {
    return use.num_words == 2 ? warp.lanes<uint64_t>(use)[lane] : warp.lanes<uint32_t>(use)[lane];
}
void put_raw(Warp& warp, const Use& use, int lane, uint64_t value) {
    if (use.num_words == 2) warp.lanes<uint64_t>(use)[lane] = value;
    else warp.lanes<uint32_t>(use)[lane] = static_cast<uint32_t>(value);
}
// n[0]: bits of a part.
void pack(Warp& warp, const Instruction& instruction, Mask active) {
    const int bits = static_cast<int>(instruction.n[0]);
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        uint64_t whole = 0;
        for (size_t i = 0; i < instruction.from.size(); ++i) whole |= (raw(warp, instruction.from[i], lane) & mask) << (bits * i);
        put_raw(warp, instruction.to[0], lane, whole);
    }
}
void unpack(Warp& warp, const Instruction& instruction, Mask active) {
    const int bits = static_cast<int>(instruction.n[0]);
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(active >> lane & 1)) continue;
        const uint64_t whole = raw(warp, instruction.from[0], lane);
        for (size_t i = 0; i < instruction.to.size(); ++i) put_raw(warp, instruction.to[i], lane, whole >> (bits * i) & mask);
    }
}

void decode_mov(Decoder& decoder) {
    const Type type = last_type(decoder);
    Instruction& instruction = decoder.instruction();
    if (type.kind == 'p') {
        set_operands(decoder, 1, 1);
        instruction.run = move_predicate;
        return;
    }
    const size_t num_to = decoder.operand(0).parts.size(), num_from = decoder.operand(1).parts.size();
    if (num_to || num_from) {
        const int bits = type.bits / static_cast<int>(num_to ? num_to : num_from);
        instruction.n[0] = bits;
        decoder.to_all(0, num_to ? bits : type.bits);
        decoder.from_all(1, num_from ? bits : type.bits);
        instruction.run = num_to ? unpack : pack;
        return;
    }
    set_operands(decoder, type.bits * type.num_packed, 1);
    instruction.run = type.bits == 64 ? move<uint64_t> : move<uint32_t>;
}

}  // namespace

void add_elementwise(DecodeTable& table) {
    table["add"] = decode_binary<kAdd, kFloatAdd>;
    table["sub"] = decode_binary<kSub, kFloatSub>;
    table["mul"] = decode_mul;
    table["mad"] = decode_mad;
    table["fma"] = decode_fma;
    table["div"] = decode_binary<kDiv, kFloatDiv>;
    table["rem"] = [](Decoder& decoder) {
        const Type type = last_type(decoder);
        set_operands(decoder, type.bits, 2);
        decoder.instruction().run = binary_integer<kRem>(type);
    };
    table["min"] = decode_extremum<kMin, kMinRelu, kFloatMin, kFloatMinNan, kMinXorSign>;
    table["max"] = decode_extremum<kMax, kMaxRelu, kFloatMax, kFloatMaxNan, kMaxXorSign>;
    table["neg"] = decode_sign<kNeg, kFloatNeg>;
    table["abs"] = decode_sign<kAbs, kFloatAbs>;
    table["ex2"] = decode_unary_float<kExp2>;
    table["lg2"] = decode_unary_float<kLog2>;
    table["rcp"] = decode_unary_float<kReciprocal>;
    table["rsqrt"] = decode_unary_float<kRsqrt>;
    table["sqrt"] = decode_unary_float<kSqrt>;
    table["sin"] = decode_unary_float<kSin>;
    table["cos"] = decode_unary_float<kCos>;
    table["tanh"] = decode_unary_float<kTanh>;
    table["and"] = decode_logic<0, kAnd>;
    table["or"] = decode_logic<1, kOr>;
    table["xor"] = decode_logic<2, kXor>;
    table["not"] = decode_logic<3, kNot>;
    table["shl"] = decode_shift<kShl>;
    table["shr"] = decode_shift<kShr>;
    table["shf"] = decode_funnel_shift;
    table["bfe"] = decode_bfe;
    table["bfi"] = decode_bfi;
    table["prmt"] = decode_prmt;
    table["lop3"] = decode_lop3;
    table["clz"] = decode_count<kLeadingZeros>;
    table["popc"] = decode_count<kPopulation>;
    table["brev"] = decode_brev;
    table["bfind"] = decode_bfind;
    table["setp"] = decode_setp;
    table["selp"] = decode_selp;
    table["mov"] = decode_mov;
}

}  // namespace software_gpu
