"""See the package."""

from tensorrt_llm import GuidedDecodingParams as GuidedDecodingParams
