"""The table of the model's tensors; config.pbtxt, request reading and documentation follow from it.

Knows the names of two contracts, both accepted at the same time: `llmapi` is what TensorRT-LLM's
triton_backend/all_models/llmapi takes, `bls` what its tensorrt_llm_bls and ensemble take.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTensor:
    """One output, in every response or only the last; `asked_by` is the field that requests it, if any."""

    name: str
    type: TensorType
    meaning: str
    when: Literal["every", "last"]
    dims: tuple[int, ...] = (1,)
    asked_by: str | None = None


def _pair(
    field: str, type: TensorType, bls: str, llmapi: str | None, meaning: str, *, is_list: bool = False
) -> tuple[InputTensor, ...]:
    """An input under its names in both contracts; None as `llmapi` means that only the other one has it."""
    names: tuple[tuple[str | None, Contract], ...] = ((bls, "bls"), (llmapi, "llmapi"))
    return tuple(
        InputTensor(name=name, type=type, field=field, meaning=meaning, contract=contract, is_list=is_list)
        for name, contract in names
        if name is not None
    )


def _own(field: str, type: TensorType, meaning: str, *, is_list: bool = False) -> InputTensor:
    return InputTensor(name=field, type=type, field=field, meaning=meaning, contract="own", is_list=is_list)


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
            name=f"{prefix}_top_{kind}",
            type=type,
            meaning=f"{words} {of}: [tokens, `{asked_by}`].",
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
        return (_own(row.name, type, meaning, is_list=row.is_list),)
    return _pair(row.name, type, *row.trtllm_names, meaning, is_list=row.is_list)


INPUTS: tuple[InputTensor, ...] = (
    InputTensor(
        name="text_input",
        type="STRING",
        field="text_input",
        meaning="The prompt as text; the user's message where the model was deployed with `--chat`.",
        contract="bls",
    ),
    _own("messages", "STRING", "The prompt as a conversation: a JSON list of objects with `role` and `content`."),
    _own("input_ids", "INT32", "The prompt as token ids.", is_list=True),
    *_pair("stream", "BOOL", "stream", "streaming", "One response per verify step instead of one in all."),
    # The contracts ask for log-probabilities in two ways of their own, below.
    *(tensor for row in SAMPLING_FIELDS if row.name != "logprobs" for tensor in _sampling(row)),
    InputTensor(name="num_return_sequences", type="INT32", field="n", meaning="The same as `n`.", contract="bls"),
    InputTensor(
        name="end_id",
        type="INT32",
        field="end_id",
        meaning="Stop after this token instead of the model's end-of-sequence ids; -1: after none.",
        contract="bls",
    ),
    *_pair(
        "exclude_input",
        "BOOL",
        "exclude_input_in_output",
        "sampling_param_exclude_input_from_output",
        "False: the output begins with the prompt, text and ids. Unset: true.",
    ),
    InputTensor(
        name="return_log_probs",
        type="BOOL",
        field="return_log_probs",
        meaning="Give `output_log_probs` and `cum_log_probs`.",
        contract="bls",
    ),
    InputTensor(
        name="return_cumulative_logprob",
        type="BOOL",
        field="return_cumulative_logprob",
        meaning="Give `cumulative_logprob`.",
        contract="llmapi",
    ),
    InputTensor(
        name="return_finish_reason",
        type="BOOL",
        field="return_finish_reason",
        meaning="`finish_reason` is given unless this is false.",
        contract="llmapi",
    ),
    InputTensor(
        name="return_stop_reason",
        type="BOOL",
        field="return_stop_reason",
        meaning="Give `stop_reason`.",
        contract="llmapi",
    ),
    *_pair(
        "return_perf_metrics",
        "BOOL",
        "return_perf_metrics",
        "sampling_param_return_perf_metrics",
        "Give the times and `kv_cache_hit_rate`; what concerns drafts is always given.",
    ),
    InputTensor(
        name="stop",
        type="BOOL",
        field="cancel",
        meaning="True: no prompt, but the end of the request that runs under this request's id.",
        contract="llmapi",
    ),
    InputTensor(
        name="pad_id", type="INT32", field="pad_id", meaning="Any value: no output is ever padded.", contract="bls"
    ),
    _own(
        "chat_template_kwargs",
        "STRING",
        'Variables of the chat template as a JSON object, `{"enable_thinking": false}` for example.',
    ),
    _own("priority", "INT32", "Requests of higher priority go first; 0 where unset."),
    _own("queue_timeout_s", "FP32", "Seconds to wait for the first step at most."),
    _own("cache_salt", "STRING", "Prefixes are reused only among requests of the same salt."),
    _neutral("length_penalty", "FP32", (0, 1)),
    _neutral("beam_width", "INT32", (1,)),
    _neutral("sampling_param_best_of", "INT32", (1,), contract="llmapi"),
    _neutral("return_context_logits", "BOOL", (0,)),
    _neutral("return_generation_logits", "BOOL", (0,)),
)

OUTPUTS: tuple[OutputTensor, ...] = (
    OutputTensor(name="text_output", type="STRING", meaning="New text; all of it without `stream`.", when="every"),
    OutputTensor(name="output_ids", type="INT32", meaning="New token ids.", when="every", dims=(-1,)),
    OutputTensor(
        name="output_log_probs",
        type="FP32",
        meaning="Log-probability of each of them: [1, tokens], as in a beam search of width 1.",
        when="every",
        dims=(-1, -1),
        asked_by="return_log_probs",
    ),
    OutputTensor(
        name="cum_log_probs",
        type="FP32",
        meaning="Sum of all log-probabilities.",
        when="last",
        asked_by="return_log_probs",
    ),
    OutputTensor(
        name="cumulative_logprob", type="FP32", meaning="The same.", when="last", asked_by="return_cumulative_logprob"
    ),
    OutputTensor(name="finish_reason", type="STRING", meaning="`stop`, `length` or `cancelled`.", when="last"),
    OutputTensor(
        name="stop_reason",
        type="STRING",
        meaning="The stop string, or the id of the stop token, that ended it; empty for another end.",
        when="last",
        asked_by="return_stop_reason",
    ),
    OutputTensor(name="num_input_tokens", type="INT32", meaning="Prompt tokens.", when="last"),
    OutputTensor(name="num_output_tokens", type="INT32", meaning="Generated tokens.", when="last"),
    OutputTensor(
        name="acceptance_rate",
        type="FP32",
        meaning="Accepted / verified drafts; 0 where none was verified.",
        when="last",
    ),
    OutputTensor(name="total_accepted_draft_tokens", type="INT32", meaning="Accepted drafts.", when="last"),
    OutputTensor(name="total_draft_tokens", type="INT32", meaning="Verified drafts.", when="last"),
    OutputTensor(name="num_verify_steps", type="INT32", meaning="Steps that verified a draft.", when="last"),
    OutputTensor(
        name="acceptance_length",
        type="FP32",
        meaning="Mean tokens per verify step, bonus included; 0 where there was none.",
        when="last",
    ),
    OutputTensor(
        name="kv_cache_hit_rate",
        type="FP32",
        meaning="Part of the prompt's tokens that a kept prefix saved.",
        when="last",
        asked_by="return_perf_metrics",
    ),
    *(
        OutputTensor(
            name=f"{moment}_time_ns",
            type="INT64",
            meaning=f"{words}, in nanoseconds of the server's monotonic clock.",
            when="last",
            asked_by="return_perf_metrics",
        )
        for moment, words in (
            ("arrival", "Arrival"),
            ("first_scheduled", "Beginning of the first step"),
            ("first_token", "First token"),
            ("last_token", "Last token"),
        )
    ),
    OutputTensor(name="batch_index", type="INT32", meaning="Always 0.", when="last"),
    OutputTensor(name="sequence_index", type="INT32", meaning="Whose response: 0 to `n` - 1.", when="every"),
    *_top_outputs("output", "every", "new token", "top_logprobs"),
    OutputTensor(
        name="prompt_log_probs",
        type="FP32",
        meaning="Log-probability of every prompt token from the second on; of sequence 0 alone.",
        when="last",
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
