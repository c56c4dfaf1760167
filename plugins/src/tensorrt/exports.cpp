// What TensorRT asks a plugin library for. With getCreators alone it loads nothing, without a word.
#include "tensorrt/attend_draft_plugin.h"
#include "tensorrt/attend_latents_plugin.h"
#include "tensorrt/attend_pages_plugin.h"
#include "tensorrt/collective_plugin.h"
#include "tensorrt/draft_tokens_plugin.h"
#include "tensorrt/experts_plugin.h"
#include "tensorrt/gated_delta_plugin.h"
#include "tensorrt/log.h"
#include "tensorrt/plugin_creator.h"
#include "tensorrt/previous_rows_plugin.h"
#include "tensorrt/sample_and_accept_plugin.h"
#include "tensorrt/write_draft_context_plugin.h"

#include <NvInferRuntime.h>

#include <iterator>
#include <utility>

namespace
{

template <typename Plugin>
std::unique_ptr<dflash_trt::StepPlugin> make(dflash_trt::PluginFields fields, nvinfer1::TensorRTPhase phase)
{
    return std::make_unique<Plugin>(std::move(fields), phase);
}

template <dflash_trt::PluginContract const& contract>
std::unique_ptr<dflash_trt::StepPlugin> make_collective(dflash_trt::PluginFields fields, nvinfer1::TensorRTPhase phase)
{
    return std::make_unique<dflash_trt::CollectivePlugin>(contract, std::move(fields), phase);
}

} // namespace

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& num_creators) noexcept
{
    using namespace dflash_trt;
    static PluginCreator attend_pages_creator(kAttendPages, make<AttendPagesPlugin>);
    static PluginCreator attend_draft_creator(kAttendDraft, make<AttendDraftPlugin>);
    static PluginCreator write_draft_context_creator(kWriteDraftContext, make<WriteDraftContextPlugin>);
    static PluginCreator previous_rows_creator(kPreviousRows, make<PreviousRowsPlugin>);
    static PluginCreator sample_and_accept_creator(kSampleAndAccept, make<SampleAndAcceptPlugin>);
    static PluginCreator draft_tokens_creator(kDraftTokens, make<DraftTokensPlugin>);
    static PluginCreator experts_creator(kExperts, make<ExpertsPlugin>);
    static PluginCreator gated_delta_creator(kGatedDelta, make<GatedDeltaPlugin>);
    static PluginCreator attend_latents_creator(kAttendLatents, make<AttendLatentsPlugin>);
    static PluginCreator all_reduce_creator(kAllReduce, make_collective<kAllReduce>);
    static PluginCreator all_gather_creator(kAllGather, make_collective<kAllGather>);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&attend_pages_creator, &attend_draft_creator,
        &write_draft_context_creator, &previous_rows_creator, &sample_and_accept_creator,
        &draft_tokens_creator, &experts_creator, &gated_delta_creator, &attend_latents_creator, &all_reduce_creator,
        &all_gather_creator};
    num_creators = static_cast<int32_t>(std::size(creators));
    return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    dflash_trt::set_logger_finder(finder);
}
