"""`quant_method: mxfp4` of a config.json; the names of the tensors show which weights are in MXFP4."""

from pathlib import Path

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.producers.base import SECTION, producer_of, require_known_producer, section_of


def require_mxfp4(reader: ConfigReader) -> None:
    """Allow MXFP4, and ModelOpt as everywhere."""
    section = reader.value(SECTION)
    producer = producer_of(section)
    if not isinstance(section, dict) or (producer is not None and producer.name == "ModelOpt"):
        require_known_producer(reader)
        return
    nested = reader.nested(SECTION, section)
    hint = "Use the checkpoint with MXFP4 experts, or an unquantized one."
    nested.require("quant_method", "mxfp4", default="none", hint=hint)
    nested.ignore(("modules_to_not_convert", "dequantize"))
    nested.finish()


def has_mxfp4(directory: Path) -> bool:
    """True if the config.json of a checkpoint says that its experts are in MXFP4."""
    section = section_of(directory)
    return isinstance(section, dict) and section.get("quant_method") == "mxfp4"
