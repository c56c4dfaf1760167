#include "runtime/problem.h"

namespace dflash_trt
{

Problem::Problem(
    std::string const& subject, std::string const& expected, std::string const& found, std::string const& mend)
    : std::runtime_error(subject + ": expected " + expected + ", found " + found + ". " + mend)
{
}

} // namespace dflash_trt
