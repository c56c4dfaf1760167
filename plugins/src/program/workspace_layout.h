// Places in a workspace, one behind the other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash_trt
{

class WorkspaceLayout
{
public:
    explicit WorkspaceLayout(size_t begin = 0) : mEnd(begin) {}

    /// Where the next tensor begins.
    size_t add(int64_t num_bytes)
    {
        size_t const start = mEnd;
        mEnd += (static_cast<size_t>(num_bytes) + kAlignment - 1) / kAlignment * kAlignment;
        return start;
    }

    [[nodiscard]] size_t end() const { return mEnd; }

private:
    static constexpr size_t kAlignment = 256;

    size_t mEnd;
};

} // namespace dflash_trt
