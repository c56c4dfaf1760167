"""The table of the model's tensors; config.pbtxt, request reading and documentation follow from it.

Knows the names of two contracts, both accepted at the same time: `llmapi` is what TensorRT-LLM's
triton_backend/all_models/llmapi takes, `bls` what its tensorrt_llm_bls and ensemble take.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingField

TensorType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT64", "FP32"]
Contract = Literal["llmapi", "bls", "own"]

_TYPES: dict[type, TensorType] = {int: "INT32", float: "FP32", str: "STRING", bool: "BOOL"}
_ADDED_MEANING = {"temperature": " Unset: 0, or 1 where one of the filters below is on."}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputTensor:
    """One input. Inputs with the same `field` mean the same; a request gives one of them, or equal values.

    `neutral` lists the only values of an input for something the engine does not do: those that ask for nothing.
    """

    name: str
    type: TensorType
    field: str
    meaning: str
    contract: Contract
    is_list: bool = False
    neutral: tuple[float | str, ...] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        return (-1,) if self.is_list else (1,)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output, in every response or only the last; `asked_by` is the field that requests it, if any."""

    name: str
    type: TensorType
    meaning: str
    _: KW_ONLY
    when: Literal["every", "last"] = "last"
    dims: tuple[int, ...] = (1,)
    asked_by: str | None = None


def _input(
    name: str, type: TensorType, meaning: str, *, contract: Contract = "own", field: str = "", is_list: bool = False
) -> InputTensor:
    """An input under one name; its field has that name, too, unless another is given."""
    return InputTensor(name=name, type=type, field=field or name, meaning=meaning, contract=contract, is_list=is_list)


def _pair(
    field: str, type: TensorType, bls: str, llmapi: str | None, meaning: str, *, is_list: bool = False
) -> tuple[InputTensor, ...]:
    """An input under its names in both contracts; None as `llmapi` means that only the other one has it."""
    names: tuple[tuple[str | None, Contract], ...] = ((bls, "bls"), (llmapi, "llmapi"))
    return tuple(
        _input(name, type, meaning, contract=contract, field=field, is_list=is_list)
        for name, contract in names
        if name is not None
    )


def _neutral(
    name: str, type: TensorType, neutral: tuple[float | str, ...], *, contract: Contract = "bls"
) -> InputTensor:
    values = " or ".join(f"{value:g}" for value in neutral if not isinstance(value, str))
    meaning = f"Not implemented: {values} or nothing."
    if type == "BOOL":
        meaning = "Not implemented: false or nothing."
    return InputTensor(name=name, type=type, field=name, meaning=meaning, contract=contract, neutral=neutral)


def _top_outputs(prefix: str, when: Literal["every", "last"], of: str, asked_by: str) -> tuple[OutputTensor, ...]:
    kinds: tuple[tuple[str, TensorType, str], ...] = (
        ("token_ids", "INT32", "The most likely tokens at each"),
        ("log_probs", "FP32", "Their log-probabilities at each"),
    )
    return tuple(
        OutputTensor(
            f"{prefix}_top_{kind}",
            type,
            f"{words} {of}: [tokens, `{asked_by}`].",
            when=when,
            dims=(-1, -1),
            asked_by=asked_by,
        )
        for kind, type, words in kinds
    )


def _sampling(row: SamplingField) -> tuple[InputTensor, ...]:
    """The inputs of one sampling parameter."""
    type: TensorType = "UINT64" if row.dtype == "int64" else _TYPES[row.kind]
    meaning = f"[`{row.name}`](settings.md#sampling)." + _ADDED_MEANING.get(row.name, "")
    if row.trtllm_names is None:
        return (_input(row.name, type, meaning, is_list=row.is_list),)
    return _pair(row.name, type, *row.trtllm_names, meaning, is_list=row.is_list)


INPUTS: tuple[InputTensor, ...] = (
    _input(
        "text_input",
        "STRING",
        "The prompt as text; the user's message where the model was deployed with `--chat`.",
        contract="bls",
    ),
    _input("messages", "STRING", "The prompt as a conversation: a JSON list of objects with `role` and `content`."),
    _input("input_ids", "INT32", "The prompt as token ids.", is_list=True),
    *_pair("stream", "BOOL", "stream", "streaming", "One response per verify step instead of one in all."),
    # The contracts ask for log-probabilities in two ways of their own, below.
    *(tensor for row in SAMPLING_FIELDS if row.name != "logprobs" for tensor in _sampling(row)),
    _input("num_return_sequences", "INT32", "The same as `n`.", contract="bls", field="n"),
    _input(
        "end_id",
        "INT32",
        "Stop after this token instead of the model's end-of-sequence ids; -1: after none.",
        contract="bls",
    ),
    *_pair(
        "exclude_input",
        "BOOL",
        "exclude_input_in_output",
        "sampling_param_exclude_input_from_output",
        "False: the output begins with the prompt, text and ids. Unset: true.",
    ),
    _input("return_log_probs", "BOOL", "Give `output_log_probs` and `cum_log_probs`.", contract="bls"),
    _input("return_cumulative_logprob", "BOOL", "Give `cumulative_logprob`.", contract="llmapi"),
    _input("return_finish_reason", "BOOL", "`finish_reason` is given unless this is false.", contract="llmapi"),
    _input("return_stop_reason", "BOOL", "Give `stop_reason`.", contract="llmapi"),
    *_pair(
        "return_perf_metrics",
        "BOOL",
        "return_perf_metrics",
        "sampling_param_return_perf_metrics",
        "Give the times and `kv_cache_hit_rate`; what concerns drafts is always given.",
    ),
    _input(
        "stop",
        "BOOL",
        "True: no prompt, but the end of the request that runs under this request's id.",
        contract="llmapi",
        field="cancel",
    ),
    _input("pad_id", "INT32", "Any value: no output is ever padded.", contract="bls"),
    _input(
        "chat_template_kwargs",
        "STRING",
        'Variables of the chat template as a JSON object, `{"enable_thinking": false}` for example.',
    ),
    _input("priority", "INT32", "Requests of higher priority go first; 0 where unset."),
    _input("queue_timeout_s", "FP32", "Seconds to wait for the first step at most."),
    _input("cache_salt", "STRING", "Prefixes are reused only among requests of the same salt."),
    _neutral("length_penalty", "FP32", (0, 1)),
    _neutral("beam_width", "INT32", (1,)),
    _neutral("sampling_param_best_of", "INT32", (1,), contract="llmapi"),
    _neutral("return_context_logits", "BOOL", (0,)),
    _neutral("return_generation_logits", "BOOL", (0,)),
)

OUTPUTS: tuple[OutputTensor, ...] = (
    OutputTensor("text_output", "STRING", "New text; all of it without `stream`.", when="every"),
    OutputTensor("output_ids", "INT32", "New token ids.", when="every", dims=(-1,)),
    OutputTensor(
        "output_log_probs",
        "FP32",
        "Log-probability of each of them: [1, tokens], as in a beam search of width 1.",
        when="every",
        dims=(-1, -1),
        asked_by="return_log_probs",
    ),
    OutputTensor("cum_log_probs", "FP32", "Sum of all log-probabilities.", asked_by="return_log_probs"),
    OutputTensor("cumulative_logprob", "FP32", "The same.", asked_by="return_cumulative_logprob"),
    OutputTensor("finish_reason", "STRING", "`stop`, `length` or `cancelled`."),
    OutputTensor(
        "stop_reason",
        "STRING",
        "The stop string, or the id of the stop token, that ended it; empty for another end.",
        asked_by="return_stop_reason",
    ),
    OutputTensor("num_input_tokens", "INT32", "Prompt tokens."),
    OutputTensor("num_output_tokens", "INT32", "Generated tokens."),
    OutputTensor("acceptance_rate", "FP32", "Accepted / verified drafts; 0 where none was verified."),
    OutputTensor("total_accepted_draft_tokens", "INT32", "Accepted drafts."),
    OutputTensor("total_draft_tokens", "INT32", "Verified drafts."),
    OutputTensor("num_verify_steps", "INT32", "Steps that verified a draft."),
    OutputTensor("acceptance_length", "FP32", "Mean tokens per verify step, bonus included; 0 where there was none."),
    OutputTensor(
        "kv_cache_hit_rate",
        "FP32",
        "Part of the prompt's tokens that a kept prefix saved.",
        asked_by="return_perf_metrics",
    ),
    *(
        OutputTensor(
            f"{moment}_time_ns",
            "INT64",
            f"{words}, in nanoseconds of the server's monotonic clock.",
            asked_by="return_perf_metrics",
        )
        for moment, words in (
            ("arrival", "Arrival"),
            ("first_scheduled", "Beginning of the first step"),
            ("first_token", "First token"),
            ("last_token", "Last token"),
        )
    ),
    OutputTensor("batch_index", "INT32", "Always 0."),
    OutputTensor("sequence_index", "INT32", "Whose response: 0 to `n` - 1.", when="every"),
    *_top_outputs("output", "every", "new token", "top_logprobs"),
    OutputTensor(
        "prompt_log_probs",
        "FP32",
        "Log-probability of every prompt token from the second on; of sequence 0 alone.",
        dims=(-1,),
        asked_by="prompt_logprobs",
    ),
    *_top_outputs("prompt", "last", "of those prompt tokens", "prompt_logprobs"),
)

INPUTS_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
OUTPUTS_BY_NAME = {tensor.name: tensor for tensor in OUTPUTS}


def documentation_tables() -> tuple[str, str]:
    """Inputs and outputs as the Markdown tables of docs/deployment.md."""
    inputs = ["| input | type | contract | meaning |", "|---|---|---|---|"]
    for field in dict.fromkeys(tensor.field for tensor in INPUTS):
        group = [tensor for tensor in INPUTS if tensor.field == field]
        names = ", ".join(f"`{tensor.name}`" for tensor in group)
        contracts = ", ".join(dict.fromkeys(tensor.contract for tensor in group))
        first = group[0]
        inputs.append(f"| {names} | {first.type}{list(first.dims)} | {contracts} | {first.meaning} |")
    outputs = ["| output | type | in responses | meaning |", "|---|---|---|---|"]
    for tensor in OUTPUTS:
        when = tensor.when + (f", with `{tensor.asked_by}`" if tensor.asked_by else "")
        outputs.append(f"| `{tensor.name}` | {tensor.type}{list(tensor.dims)} | {when} | {tensor.meaning} |")
    return "\n".join(inputs), "\n".join(outputs)
