// Elements of matrices, and where the matrices of wgmma and tcgen05 lie in shared memory.
#pragma once

#include <array>
#include <map>
#include <string>

#include "numbers.h"
#include "program.h"

namespace software_gpu {

enum Element : int64_t { kTf32Element, kHalfElement, kBfloatElement, kE4m3Element, kE5m2Element, kE2m1Element, kS8Element };

inline Element element_of(const std::string& word) {
    static const std::map<std::string, Element> kElements = {{"tf32", kTf32Element}, {"f16", kHalfElement}, {"bf16", kBfloatElement}, {"e4m3", kE4m3Element}, {"e5m2", kE5m2Element}, {"s8", kS8Element}};
    const auto found = kElements.find(word);
    if (found == kElements.end()) throw Fault("no such element of a matrix: " + word);
    return found->second;
}

inline int bits_of(int64_t element) { return element == kTf32Element ? 32 : element == kE2m1Element ? 4 : element >= kE4m3Element ? 8 : 16; }

template <class F>
std::array<float, 256> table_of(F value) {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) values[code] = value(static_cast<uint8_t>(code));
    return values;
}

inline float e4m3_value(uint32_t bits) {
    static const auto kTable = table_of([](uint8_t code) { return kE4m3.value(code); });
    return kTable[bits & 0xff];
}

inline float element_value(uint32_t bits, int64_t element) {
    switch (element) {
        case kTf32Element: return tf32_read(bits);
        case kHalfElement: return Half{static_cast<uint16_t>(bits)}.value();
        case kBfloatElement: return Bfloat16{static_cast<uint16_t>(bits)}.value();
        case kE4m3Element: return e4m3_value(bits);
        case kE2m1Element: return kE2m1.value(bits & 0xf);
        case kS8Element: return static_cast<int8_t>(bits);
        default: return e5m2_value(static_cast<uint8_t>(bits));
    }
}

// PTX ISA, "Shared Memory Matrix Layout" and "Canonical Layouts".
struct SharedMatrix {
    uint32_t start, leading, stride;  // bytes
    uint32_t width;                   // bytes of a row of the swizzled pattern
    uint32_t mask;                    // of the bits that are swizzled

    // Both kinds of descriptors encode them alike.
    SharedMatrix(uint64_t descriptor, uint32_t of_width)
        : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4), leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
          stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4), width(of_width), mask(of_width / 16 - 1) {}

    // `row` along M or N, `column` along K. K-major: rows hold consecutive K.
    uint32_t address(int row, int column, int bits, bool is_k_major) const {
        uint32_t at = start;
        if (is_k_major) {
            const uint32_t along = static_cast<uint32_t>(column * bits / 8);
            at += row / 8 * stride + row % 8 * width;
            at += mask ? along : along / 16 * leading + along % 16;
        } else {
            const int per_width = static_cast<int>(width) * 8 / bits;
            at += row / per_width * (mask ? leading : stride) + column / 8 * (mask ? stride : leading) + column % 8 * width + row % per_width * bits / 8;
        }
        return at ^ (at >> 7 & mask) << 4;
    }
};

// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format".
inline SharedMatrix wgmma_matrix(uint64_t descriptor) {
    static constexpr uint32_t kWidths[] = {16, 128, 64, 32};
    return {descriptor, kWidths[descriptor >> 62]};
}

// PTX ISA, "TensorCore 5th Generation: Shared Memory Descriptor".
inline SharedMatrix tcgen05_matrix(uint64_t descriptor) {
    static constexpr uint32_t kWidths[] = {16, 0, 128, 0, 64, 0, 32, 0};
    const uint32_t width = kWidths[descriptor >> 61];
    if ((descriptor >> 46 & 7) != 1 || descriptor >> 53 & 0xff) throw Fault("a descriptor of a matrix in shared memory without its fixed bits");
    if (!width || descriptor >> 49 & 0xf) throw Fault("no such layout of a matrix in shared memory");  // other atoms, a base offset, absolute strides
    return {descriptor, width};
}

}  // namespace software_gpu
