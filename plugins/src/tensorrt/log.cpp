#include "tensorrt/log.h"

#include <atomic>
#include <cstdio>

namespace dflash_trt
{
namespace
{
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

void log(nvinfer1::ILogger::Severity severity, char const* word, char const* message) noexcept
{
    nvinfer1::ILoggerFinder* const finder = logger_finder;
    nvinfer1::ILogger* const logger = finder != nullptr ? finder->findLogger() : nullptr;
    if (logger != nullptr)
    {
        logger->log(severity, message);
        return;
    }
    std::fprintf(stderr, "%s: %s\n", word, message);
}

} // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept
{
    logger_finder = finder;
}

void log_error(std::string const& message) noexcept
{
    log(nvinfer1::ILogger::Severity::kERROR, "error", message.c_str());
}

void log_warning(char const* message) noexcept
{
    log(nvinfer1::ILogger::Severity::kWARNING, "warning", message);
}

} // namespace dflash_trt
