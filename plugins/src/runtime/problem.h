// Errors of this library. What a caller can mend is a Problem; nothing else is thrown on purpose.
#pragma once

#include <stdexcept>
#include <string>

namespace dflash_trt
{

/// "subject: expected ..., found .... How to mend."
class Problem : public std::runtime_error
{
public:
    using std::runtime_error::runtime_error;

    Problem(std::string const& subject, std::string const& expected, std::string const& found, std::string const& mend);
};

} // namespace dflash_trt
