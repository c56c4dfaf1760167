// The way of this library's messages into TensorRT's logger.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <string>

namespace dflash_trt
{

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

/// To the logger of the engine or registry that called, or to stderr where there is none.
void log_error(std::string const& message) noexcept;
void log_warning(char const* message) noexcept;

/// Runs `call`. An exception is logged, with the plugin's name, and becomes `failure`.
template <typename Result, typename Call>
Result logged(char const* plugin, Result failure, Call const& call) noexcept
{
    try
    {
        return call();
    }
    catch (std::exception const& error)
    {
        log_error(std::string("dflash_trt::") + plugin + ": " + error.what());
    }
    return failure;
}

} // namespace dflash_trt
