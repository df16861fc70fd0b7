"""Chat completions, OpenAI's first dialect: our own, the others are translated onto it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlstreams.workers.gateway.canonical import answer_message, plain, plain_tool
from rlstreams.workers.gateway.http.dialect import ParsedRequest, event
from rlstreams.workers.gateway.http.wire import Body, bad, said_by
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Tool

MAX_CHOICES = 16
DONE = b"data: [DONE]\n\n"
# Sampling parameters that an agent may send; the run's settings take the place of most of them.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "reasoning_effort", "service_tier",
    "stop_token_ids", "chat_template_kwargs",
)  # fmt: skip
_GRAMMARS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "allowed_token_ids", "bad_words",
)  # fmt: skip
_TYPES = {429: "rate_limit_error", 410: "invalid_request_error"}


class Chat:
    """The dialect."""

    keepalive = b": waiting\n\n"

    def asked(self, data: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """See Dialect."""
        body = Body(data)
        messages = body.objects("messages")
        if not messages:
            raise bad("messages", "must hold a message", "missing_required_parameter")
        for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            if body.values.get(name):
                raise bad(name, f"is not served: use {instead}", "unsupported_parameter")
        if (body.values.get("modalities") or ["text"]) != ["text"] or "audio" in body.values:
            raise bad("modalities", "the model writes text alone", "unsupported_parameter")
        if body.values.get("continue_final_message"):
            why = "is not served: no answer goes on with a text that it did not sample"
            raise bad("continue_final_message", why, "unsupported_parameter")
        choices = body.integer("n", 1, MAX_CHOICES) or 1
        body.integer("top_logprobs", 0, 20)
        completion = body.integer("max_completion_tokens", 1)
        tools, constrained = chosen_tools(body, body.objects("tools"))
        read = tuple(plain(m, f"messages[{i}]") for i, m in enumerate(messages))
        call = CallRequest(
            dialect="chat",
            body=data,
            messages=read,
            tools=tools,
            max_tokens=body.integer("max_tokens", 1) if completion is None else completion,
            stop=body.stops("stop"),
            requested=body.requested(SAMPLING),
            constrained=constrained or _constraint(body),
            model=body.text("model"),
            **said_by(headers),
        )
        others = (replace(call, choice=choice) for choice in range(1, choices))
        return ParsedRequest(calls=(call, *others), is_stream=body.flag("stream"), body=body)

    def answer(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> dict[str, Any]:
        """See Dialect."""
        wants_logprobs = asked.body.flag("logprobs")
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **answer_message(answer.parsed)},
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs_of(answer, asked) if wants_logprobs else None,
            }
            for index, answer in enumerate(answers)
        ]
        return {**_head(answers, "chat.completion", model), "choices": choices,
                "usage": _usage(answers)}  # fmt: skip

    def events(
        self, asked: ParsedRequest, answers: Sequence[CallAnswer], model: str
    ) -> Iterator[bytes]:
        """See Dialect."""
        head = _head(answers, "chat.completion.chunk", model)
        has_usage = bool(asked.body.mapping("stream_options").get("include_usage"))
        usage = {"usage": None} if has_usage else {}
        for index, answer in enumerate(answers):
            for choice in _deltas(answer, asked):
                yield event({**head, "choices": [{"index": index, **choice}], **usage})
        if has_usage:
            yield event({**head, "choices": [], "usage": _usage(answers)})
        yield DONE

    def error(self, refused: CallRefusedError) -> dict[str, Any]:
        """See Dialect."""
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(refused),
                "type": _TYPES.get(refused.status, kind),
                "param": refused.param or None,
                "code": refused.code,
            }
        }

    def failed(self, refused: CallRefusedError) -> bytes:
        """See Dialect."""
        return event(self.error(refused)) + DONE


def chosen_tools(body: Body, given: Sequence[Tool]) -> tuple[tuple[Tool, ...], str]:
    """The tools that the prompt shows, and "tool_choice" if a certain one must be called."""
    tools = tuple(plain_tool(tool, f"tools[{n}]") for n, tool in enumerate(given))
    choice = body.values.get("tool_choice", "auto")
    if choice == "none" or not tools:
        return (), ""
    return tools, "" if choice == "auto" or body.wants_some_tool else "tool_choice"


def _constraint(body: Body) -> str:
    """The parameter that asks for more than the model's own distribution; "": none does."""
    if body.mapping("response_format").get("type", "text") != "text":
        return "response_format"
    return next((name for name in ("logit_bias", *_GRAMMARS) if body.values.get(name)), "")


def _head(answers: Sequence[CallAnswer], kind: str, model: str) -> dict[str, Any]:
    first = answers[0]
    return {"id": f"chatcmpl-{first.call_id}", "object": kind, "created": first.created_s,
            "model": model, "system_fingerprint": None}  # fmt: skip


def _deltas(answer: CallAnswer, asked: ParsedRequest) -> Iterator[dict[str, Any]]:
    """The choices of the chunks of one answer."""
    message = answer_message(answer.parsed)
    said = {"content": message["content"]} if message["content"] else {}
    thought = message.get("reasoning_content")
    wants_logprobs = asked.body.flag("logprobs")
    begun = {"role": "assistant", "content": None if message["content"] is None else ""}
    yield {"delta": begun, "finish_reason": None}
    if thought:
        yield {"delta": {"reasoning_content": thought}, "finish_reason": None}
    if said or wants_logprobs:
        logprobs = {"logprobs": logprobs_of(answer, asked)} if wants_logprobs else {}
        yield {"delta": said, "finish_reason": None, **logprobs}
    for number, call in enumerate(message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": number, **call}]}, "finish_reason": None}
    yield {"delta": {}, "finish_reason": answer.finish_reason}


def logprobs_of(answer: CallAnswer, asked: ParsedRequest) -> dict[str, Any]:
    """Log-probs of the sampled tokens, as they were recorded; no other token's are."""
    shows_top = bool(asked.body.integer("top_logprobs", 0))
    content = []
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        # A piece of a character has no text of its own, and so no bytes that are known here.
        is_whole = "\ufffd" not in token
        said = {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode("utf-8", "replace")) if is_whole else None,
        }
        content.append({**said, "top_logprobs": [said] if shows_top else []})
    return {"content": content, "refusal": None}


def _usage(answers: Sequence[CallAnswer]) -> dict[str, Any]:
    prompt = answers[0].prompt_tokens
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
