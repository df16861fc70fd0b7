"""A tokenizer of bytes with the control tokens of every family, made offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from rlstreams.workers.model.tokenizer import Tokenizer

TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<assistant>", "</assistant>",
    "<user>", "</user>", "<system>", "</system>", "<image>",
)  # fmt: skip
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|assistant|>", "<|user|>",
    "<|system|>", "<|observation|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_system|>", "<|im_user|>",
    "<|im_assistant|>", "<|im_middle|>", "[EOS]", "[BOS]", "]~!b[", "]~b]", "[e~[", "〈|EOS|〉",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>",
    "<|media_end|>", "<|media_pad|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>",
    "<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>",
    "<minimax:tool_call>", "</minimax:tool_call>", *(
        f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"
        for words in (
            "begin of sentence", "end of sentence", "User", "Assistant", "System",
            "tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep",
            "tool outputs begin", "tool outputs end", "tool output begin", "tool output end",
        )
    ),
)  # fmt: skip


def chat_tokenizer(
    folder: Path, template: str = "", *, eos: str = "<|im_end|>", more: Sequence[str] = ()
) -> Tokenizer:
    """Write its files to `folder`, and load them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (*SPECIAL, *more)]
    )
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, **({"chat_template": template} if template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer(folder)
