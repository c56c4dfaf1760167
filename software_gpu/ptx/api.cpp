// The C interface, for ctypes and for a driver's double. Every function returns 0, or leaves its words in `error`.
#include <cstdio>
#include <cstring>
#include <mutex>

#include "decode.h"

using namespace software_gpu;

namespace {

struct LoadedKernel {
    std::unique_ptr<Kernel> kernel;
};

template <class F>
int guarded(char* error, int error_bytes, F run) {
    try {
        run();
        return 0;
    } catch (const std::exception& fault) {
        std::snprintf(error, static_cast<size_t>(error_bytes), "%s", fault.what());
        return 1;
    }
}

}  // namespace

extern "C" {

// The entry of a module of PTX; never freed, as launches may hold it.
void* software_gpu_load(const char* ptx, const char* entry, char* error, int error_bytes) {
    LoadedKernel* loaded = nullptr;
    guarded(error, error_bytes, [&] {
        auto module = std::make_shared<const Module>(parse_module(ptx));
        const auto found = module->entries.find(entry);
        if (found == module->entries.end()) throw Fault(std::string("no such entry: ") + entry);
        loaded = new LoadedKernel{Decoder(module, found->second).decode()};
    });
    return loaded;
}

// Bytes of all parameters, and offset and bytes of each in turn; returns their number.
int software_gpu_parameters(const void* loaded, int* offsets, int* sizes, int capacity) {
    const Entry& entry = *static_cast<const LoadedKernel*>(loaded)->kernel->entry;
    for (size_t i = 0; i < entry.parameters.size() && i < static_cast<size_t>(capacity); ++i) {
        offsets[i] = entry.parameters[i].offset;
        sizes[i] = entry.parameters[i].bytes;
    }
    return static_cast<int>(entry.parameters.size());
}

// `ranges`: begin and end of each allocation that may be touched; none: every address. `num_instructions`: of warps.
int software_gpu_launch(const void* loaded, const uint32_t* grid, int num_threads, int shared_bytes, const uint8_t* parameters, const uint64_t* ranges, int num_ranges, int is_late,
                        int finds_races, uint64_t max_instructions, uint64_t* num_instructions, char* error, int error_bytes) {
    return guarded(error, error_bytes, [&] {
        const Kernel& kernel = *static_cast<const LoadedKernel*>(loaded)->kernel;
        GlobalMemory memory;
        std::vector<GlobalMemory::Range> allowed;
        for (int i = 0; i < num_ranges; ++i) allowed.push_back({ranges[2 * i], ranges[2 * i + 1]});
        if (num_ranges) {
            for (const auto& [name, bytes] : kernel.module->globals) allowed.push_back({reinterpret_cast<uint64_t>(bytes.data()), reinterpret_cast<uint64_t>(bytes.data()) + bytes.size()});
            memory.set_ranges(std::move(allowed));
        }
        Launch launch{kernel, {grid[0], grid[1], grid[2]}, num_threads, shared_bytes, {parameters, parameters + kernel.entry->parameter_bytes}, memory,
                      {is_late != 0, finds_races != 0, max_instructions}, 0};
        launch.run();
        *num_instructions = launch.num_instructions;
    });
}
}
