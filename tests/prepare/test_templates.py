"""What twelve families of chat templates leave supervised: whole rows written out by hand, and the same rule over random talks.

Each family has a template of our own in templates/, written for the behaviour that its first line names, and a small tokenizer made here with the family's
special tokens. The rule: supervised is what the target would sample behind the prompt that a server gives it, up to and including its stop token.

Legend: «» supervised stretch; talk a list of messages; history the messages before an answer; server what an engine makes of a history.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eyas.prepare.chat import Chat, Row, Unrenderable
from eyas.prepare.sources import PLAIN, Frame, Message

TEMPLATES = Path(__file__).parent / "templates"
NUM_EXAMPLES = 1000  # random talks of the default run
NUM_EXAMPLES_LONG = 20_000


@dataclass(frozen=True)
class Family:
    special: str  # all special tokens, spaces between them
    stops: str  # those that end an answer
    eos: str  # the tokenizer's own
    bos: str | None = None  # the token with which the template begins a talk; the tokenizer would add it a second time
    call_content: str | None = None  # what a server gives the template where a call has no text
    text_arguments: bool = False  # whether it gives the arguments of a call as JSON text
    thought: str = "reasoning_content"  # under what name it gives a thought
    rstrip: bool = False  # whether special tokens swallow the whitespace behind them
    call_id: str = "call00001"


CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
FAMILIES = {
    "llama3": Family(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>",
        stops="<|end_of_text|> <|eom_id|> <|eot_id|>",
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "qwen25": Family(CHATML, stops="<|im_end|> <|endoftext|>", eos="<|im_end|>"),
    "qwen3": Family(CHATML + " <think> </think>", stops="<|im_end|> <|endoftext|>", eos="<|im_end|>"),
    "deepseek_v3": Family(DEEPSEEK, stops="<｜end▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", text_arguments=True),
    "deepseek_r1": Family(DEEPSEEK + " <think> </think>", stops="<｜end▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "kimi_k2": Family(
        "[BOS] [EOS] <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> <|tool_calls_section_end|> "
        "<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        stops="<|im_end|>",
        eos="[EOS]",
        call_id="functions.weather:0",
    ),
    "gpt_oss": Family(
        "<|startoftext|> <|endoftext|> <|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>",
        stops="<|return|> <|call|> <|endoftext|>",
        eos="<|return|>",
        thought="thinking",
    ),
    "gemma": Family("<bos> <eos> <start_of_turn> <end_of_turn>", stops="<end_of_turn> <eos>", eos="<eos>", bos="<bos>"),
    "mistral": Family(
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]", stops="</s>", eos="</s>", bos="<s>"
    ),
    "phi": Family("<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>", stops="<|end|> <|endoftext|>", eos="<|endoftext|>", rstrip=True),
    "glm": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call>",
        stops="<|user|> <|observation|> <|endoftext|>",
        eos="<|endoftext|>",
        call_content="",
    ),
    "smollm2": Family(CHATML, stops="<|im_end|>", eos="<|im_end|>"),
}


@functools.cache
def make_chat(family: str, wide: bool = False) -> Chat:
    """wide: with tokens of several newlines, so that one may span the border between the prompt and an answer."""
    facts = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    special = [AddedToken(token, special=True, normalized=False, rstrip=facts.rstrip) for token in facts.special.split()]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 60, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4 + ["a\n\n\n\nb"] * (40 if wide else 0), trainer)
    if facts.bos:
        tokenizer.post_processor = TemplateProcessing(single=f"{facts.bos} $A", special_tokens=[(facts.bos, tokenizer.token_to_id(facts.bos))])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=facts.eos, bos_token=facts.bos)
    fast.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return Chat(fast, tuple(fast.convert_tokens_to_ids(facts.stops.split())))


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None) -> Message:
    return {"role": "assistant", "content": text, **({} if thought is None else {"reasoning_content": thought})}


def call(call_id: str, thought: str | None = None) -> Message:
    """As an OpenAI log has it: no content, and the arguments as JSON text."""
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    return message if thought is None else {**message, "reasoning_content": thought}


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def with_tools(family: str, first: str | None = None, second: str | None = None) -> list[Message]:
    """A question, a call, its result and an answer; `first` and `second` are the thoughts of the call and of the answer."""
    call_id = FAMILIES[family].call_id
    return [user("Weather?"), call(call_id, first), result(call_id, "18 degrees"), answer("Warm", second)]


def stretches(row: Row) -> list[tuple[bool, list[int]]]:
    """The row cut where supervision begins or ends: (whether supervised, ids)."""
    found: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(row.tokens, row.supervised, strict=True):
        if not found or found[-1][0] != supervised:
            found.append((supervised, []))
        found[-1][1].append(token)
    return found


def marked(chat: Chat, row: Row) -> str:
    """The row as text, supervised stretches in «»."""
    return "".join(f"«{chat.decode(ids)}»" if supervised else chat.decode(ids) for supervised, ids in stretches(row))


def as_served(family: str, messages: list[Message]) -> list[Message]:
    """A history in the form in which the family's template wants it, by what FAMILIES says and not by what Chat finds out."""
    facts, served = FAMILIES[family], []
    for message in messages:
        message = {facts.thought if key == "reasoning_content" else key: value for key, value in message.items()}
        if "tool_calls" in message:
            arguments = '{"city": "Paris"}' if facts.text_arguments else {"city": "Paris"}
            message["content"] = facts.call_content
            message["tool_calls"] = [{**made, "function": {"name": "weather", "arguments": arguments}} for made in message["tool_calls"]]
        served.append(message)
    return served


def server_prompt(family: str, chat: Chat, history: list[Message], frame: Frame) -> list[int]:
    """Ids with which an engine that leaves rendering to the tokenizer asks for the next answer."""
    found = chat.tokenizer.apply_chat_template(
        as_served(family, history), tools=frame.tools, add_generation_prompt=True, tokenize=True, **frame.template_kwargs
    )
    return list(found["input_ids"] if hasattr(found, "keys") else found)


def server_prompts(family: str, chat: Chat, messages: list[Message], frame: Frame) -> Iterator[list[int]]:
    """That of each answer; made one by one, for a template may not stand those that are not asked for."""
    return (server_prompt(family, chat, messages[:j], frame) for j, message in enumerate(messages) if message["role"] == "assistant")


WEATHER = Frame(tools=[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
TOOL = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'  # the same as templates write it
NO_THINKING = Frame(template_kwargs={"enable_thinking": False})

SINGLE = [user("Hi"), answer("Hello")]
MANY = [*SINGLE, user("Bye"), answer("Ciao")]
SYSTEM = [system("Be brief."), *SINGLE]
EMPTY = [user("Hi"), answer("")]
THOUGHT = [user("Hi"), answer("Hello", "hm")]
THOUGHTS = [*THOUGHT, user("Bye"), answer("Ciao", "so")]
INLINE = [user("Hi"), answer("<think>\nhm\n</think>\n\nHello")]
NOTHING = [user("Hi"), answer("<think>\n\n</think>\n\n")]  # an empty thought and an empty answer
INLINES = [*INLINE, user("Bye"), answer("<think>\nso\n</think>\n\nCiao")]

# How each family's talks begin. What all rows below share with it is written once, here.
LLAMA_BEGIN = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
LLAMA_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
QWEN_SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOL_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHATML_HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
CHATML_BYE = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
CHATML_WEATHER = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
CHATML_RESULT = "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
V3_HI = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
KIMI_SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
KIMI_HI = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
OSS_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
OSS_HI = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
OSS_BYE = "<|start|>user<|message|>Bye<|end|><|start|>assistant"
OSS_TOOLS = (
    OSS_SYSTEM + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Tools\n\n## functions\n\n"
    "namespace functions {\n\ntype weather = () => any;\n\n} // namespace functions<|end|><|start|>user<|message|>Weather?<|end|><|start|>assistant"
)
OSS_RESULT = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"18 degrees"<|end|><|start|>assistant'
GLM_TOOLS = "[gMASK]<sop><|system|>\n# Tools\n\n<tools>\n" + TOOL + "\n</tools><|user|>\nWeather?<|assistant|>"
GLM_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call><|observation|>"


@dataclass(frozen=True)
class Golden:
    family: str
    name: str
    messages: list[Message]
    rows: list[str]
    frame: Frame = PLAIN


GOLDEN = [
    Golden("llama3", "single", SINGLE, [LLAMA_BEGIN + LLAMA_DATES + "<|eot_id|>" + LLAMA_USER + "Hi<|eot_id|>" + LLAMA_ASSISTANT + "«Hello<|eot_id|>»"]),
    Golden(
        "llama3",
        "many",
        MANY,
        [
            LLAMA_BEGIN + LLAMA_DATES + "<|eot_id|>" + LLAMA_USER + "Hi<|eot_id|>" + LLAMA_ASSISTANT + "«Hello<|eot_id|>»"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«Ciao<|eot_id|>»"
        ],
    ),
    Golden(
        "llama3", "system", SYSTEM, [LLAMA_BEGIN + LLAMA_DATES + "Be brief.<|eot_id|>" + LLAMA_USER + "Hi<|eot_id|>" + LLAMA_ASSISTANT + "«Hello<|eot_id|>»"]
    ),
    Golden(
        "llama3",
        "tools",
        with_tools("llama3"),
        [
            LLAMA_BEGIN + "Environment: ipython\n" + LLAMA_DATES + "<|eot_id|>" + LLAMA_USER + "You may call these functions:\n\n" + TOOL + "\n\nWeather?"
            "<|eot_id|>" + LLAMA_ASSISTANT + '«{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>»'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"18 degrees"<|eot_id|>' + LLAMA_ASSISTANT + "«Warm<|eot_id|>»"
        ],
        WEATHER,
    ),
    Golden("llama3", "empty", EMPTY, [LLAMA_BEGIN + LLAMA_DATES + "<|eot_id|>" + LLAMA_USER + "Hi<|eot_id|>" + LLAMA_ASSISTANT + "«<|eot_id|>»"]),
    Golden("qwen25", "single", SINGLE, [QWEN_SYSTEM + "<|im_end|>\n" + CHATML_HI + "«Hello<|im_end|>»\n"]),
    Golden("qwen25", "many", MANY, [QWEN_SYSTEM + "<|im_end|>\n" + CHATML_HI + "«Hello<|im_end|>»\n" + CHATML_BYE + "«Ciao<|im_end|>»\n"]),
    Golden("qwen25", "system", SYSTEM, ["<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML_HI + "«Hello<|im_end|>»\n"]),
    Golden(
        "qwen25",
        "tools",
        with_tools("qwen25"),
        [
            QWEN_SYSTEM + "\n\n# Tools\n\n<tools>\n" + TOOL + "\n</tools><|im_end|>\n" + CHATML_WEATHER + "«" + QWEN_CALL + "»\n"
            "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n«Warm<|im_end|>»\n"
        ],
        WEATHER,
    ),
    Golden("qwen25", "empty", EMPTY, [QWEN_SYSTEM + "<|im_end|>\n" + CHATML_HI + "«<|im_end|>»\n"]),
    # With thinking on the target opens the thought itself, so an empty one is its to write.
    Golden("qwen3", "single", SINGLE, [CHATML_HI + "«<think>\n\n</think>\n\nHello<|im_end|>»\n"]),
    Golden(
        "qwen3",
        "many",
        MANY,
        [
            CHATML_HI + "«<think>\n\n</think>\n\nHello<|im_end|>»\n",
            CHATML_HI + "Hello<|im_end|>\n" + CHATML_BYE + "«<think>\n\n</think>\n\nCiao<|im_end|>»\n",
        ],
    ),
    Golden("qwen3", "single, thinking off", SINGLE, [CHATML_HI + "<think>\n\n</think>\n\n«Hello<|im_end|>»\n"], NO_THINKING),
    Golden(
        "qwen3",
        "many, thinking off",
        MANY,
        [
            CHATML_HI + "<think>\n\n</think>\n\n«Hello<|im_end|>»\n",
            CHATML_HI + "Hello<|im_end|>\n" + CHATML_BYE + "<think>\n\n</think>\n\n«Ciao<|im_end|>»\n",
        ],
        NO_THINKING,
    ),
    Golden("qwen3", "system", SYSTEM, ["<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML_HI + "«<think>\n\n</think>\n\nHello<|im_end|>»\n"]),
    Golden(
        "qwen3",
        "tools",
        with_tools("qwen3"),
        [
            "<|im_start|>system\n# Tools\n\n<tools>\n" + TOOL + "\n</tools><|im_end|>\n" + CHATML_WEATHER + "«<think>\n\n</think>\n\n" + QWEN_CALL + "»\n",
            "<|im_start|>system\n# Tools\n\n<tools>\n" + TOOL + "\n</tools><|im_end|>\n" + CHATML_WEATHER + QWEN_CALL + "\n" + CHATML_RESULT + "«<think>\n\n"
            "</think>\n\nWarm<|im_end|>»\n",
        ],
        WEATHER,
    ),
    Golden(
        "qwen3",
        "tools, each step with a thought",
        with_tools("qwen3", "hm", "so"),
        [
            "<|im_start|>system\n# Tools\n\n<tools>\n" + TOOL + "\n</tools><|im_end|>\n" + CHATML_WEATHER + "«<think>\nhm\n</think>\n\n" + QWEN_CALL + "»\n"
            "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n«<think>\nso\n</think>\n\nWarm<|im_end|>»\n"
        ],
        WEATHER,
    ),
    Golden("qwen3", "thought", THOUGHT, [CHATML_HI + "«<think>\nhm\n</think>\n\nHello<|im_end|>»\n"]),
    Golden("qwen3", "inline thought", INLINE, [CHATML_HI + "«<think>\nhm\n</think>\n\nHello<|im_end|>»\n"]),
    Golden(
        "qwen3",
        "thoughts",
        THOUGHTS,
        [
            CHATML_HI + "«<think>\nhm\n</think>\n\nHello<|im_end|>»\n",
            CHATML_HI + "Hello<|im_end|>\n" + CHATML_BYE + "«<think>\nso\n</think>\n\nCiao<|im_end|>»\n",
        ],
    ),
    Golden("qwen3", "empty", EMPTY, [CHATML_HI + "«<think>\n\n</think>\n\n<|im_end|>»\n"]),
    Golden("deepseek_v3", "single", SINGLE, [V3_HI + "«Hello<｜end▁of▁sentence｜>»"]),
    Golden("deepseek_v3", "many", MANY, [V3_HI + "«Hello<｜end▁of▁sentence｜>»<｜User｜>Bye<｜Assistant｜>«Ciao<｜end▁of▁sentence｜>»"]),
    Golden("deepseek_v3", "system", SYSTEM, ["<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>«Hello<｜end▁of▁sentence｜>»"]),
    Golden(
        "deepseek_v3",
        "tools",
        with_tools("deepseek_v3"),
        [
            "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
            '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»'
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>18 degrees<｜tool▁output▁end｜><｜tool▁outputs▁end｜>«Warm<｜end▁of▁sentence｜>»"
        ],
        WEATHER,
    ),
    Golden("deepseek_v3", "empty", EMPTY, [V3_HI + "«<｜end▁of▁sentence｜>»"]),
    Golden("deepseek_r1", "single", INLINE, [V3_HI + "<think>\n«hm\n</think>\n\nHello<｜end▁of▁sentence｜>»"]),
    Golden(
        "deepseek_r1",
        "many",
        INLINES,
        [
            V3_HI + "<think>\n«hm\n</think>\n\nHello<｜end▁of▁sentence｜>»",
            V3_HI + "\n\nHello<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜><think>\n«so\n</think>\n\nCiao<｜end▁of▁sentence｜>»",
        ],
    ),
    Golden(
        "deepseek_r1",
        "system",
        [system("Be brief."), *INLINE],
        ["<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>\n«hm\n</think>\n\nHello<｜end▁of▁sentence｜>»"],
    ),
    Golden("deepseek_r1", "empty", NOTHING, [V3_HI + "<think>\n«\n</think>\n\n<｜end▁of▁sentence｜>»"]),
    Golden("kimi_k2", "single", SINGLE, [KIMI_SYSTEM + KIMI_HI + "«Hello<|im_end|>»"]),
    Golden(
        "kimi_k2",
        "many",
        MANY,
        [KIMI_SYSTEM + KIMI_HI + "«Hello<|im_end|>»<|im_user|>user<|im_middle|>Bye<|im_end|><|im_assistant|>assistant<|im_middle|>«Ciao<|im_end|>»"],
    ),
    Golden("kimi_k2", "system", SYSTEM, ["<|im_system|>system<|im_middle|>Be brief.<|im_end|>" + KIMI_HI + "«Hello<|im_end|>»"]),
    Golden(
        "kimi_k2",
        "tools",
        with_tools("kimi_k2"),
        [
            "<|im_system|>tool_declare<|im_middle|>[" + TOOL + "]<|im_end|>" + KIMI_SYSTEM + "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>«<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>»<|im_system|>tool<|im_middle|>## Return of functions.weather:0\n18 degrees'
            "<|im_end|><|im_assistant|>assistant<|im_middle|>«Warm<|im_end|>»"
        ],
        WEATHER,
    ),
    Golden("kimi_k2", "empty", EMPTY, [KIMI_SYSTEM + KIMI_HI + "«<|im_end|>»"]),
    Golden("gpt_oss", "single", SINGLE, [OSS_SYSTEM + "<|end|>" + OSS_HI + "«<|channel|>final<|message|>Hello<|return|>»"]),
    Golden(
        "gpt_oss",
        "many",
        MANY,
        [
            OSS_SYSTEM + "<|end|>" + OSS_HI + "«<|channel|>final<|message|>Hello<|return|>»",
            OSS_SYSTEM + "<|end|>" + OSS_HI + "<|channel|>final<|message|>Hello<|end|>" + OSS_BYE + "«<|channel|>final<|message|>Ciao<|return|>»",
        ],
    ),
    Golden(
        "gpt_oss",
        "system",
        SYSTEM,
        [
            OSS_SYSTEM + "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>" + OSS_HI + "«<|channel|>final<|message|>Hello<|return|>»",
        ],
    ),
    Golden(
        "gpt_oss",
        "tools",
        with_tools("gpt_oss"),
        [
            OSS_TOOLS + '« to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>»' + OSS_RESULT + "«<|channel|>final<|message|>"
            "Warm<|return|>»"
        ],
        WEATHER,
    ),
    Golden(  # the thought of the call stands in the prompt for the answer, where no final answer follows yet
        "gpt_oss",
        "tools, the call with a thought",
        with_tools("gpt_oss", "hm"),
        [
            OSS_TOOLS + "«<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Paris"}<|call|>»' + OSS_RESULT + "«<|channel|>final<|message|>Warm<|return|>»"
        ],
        WEATHER,
    ),
    Golden(
        "gpt_oss",
        "thought",
        THOUGHT,
        [
            OSS_SYSTEM + "<|end|>" + OSS_HI + "«<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>»",
        ],
    ),
    Golden(
        "gpt_oss",
        "thoughts",
        THOUGHTS,
        [
            OSS_SYSTEM + "<|end|>" + OSS_HI + "«<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>»",
            OSS_SYSTEM + "<|end|>" + OSS_HI + "<|channel|>final<|message|>Hello<|end|>" + OSS_BYE + "«<|channel|>analysis<|message|>so<|end|><|start|>assistant"
            "<|channel|>final<|message|>Ciao<|return|>»",
        ],
    ),
    Golden("gpt_oss", "empty", EMPTY, [OSS_SYSTEM + "<|end|>" + OSS_HI + "«<|channel|>final<|message|><|return|>»"]),
    Golden("gemma", "single", SINGLE, ["<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello<end_of_turn>»\n"]),
    Golden(
        "gemma",
        "many",
        MANY,
        [
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello<end_of_turn>»\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n«Ciao<end_of_turn>»\n"
        ],
    ),
    Golden("gemma", "empty", EMPTY, ["<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«<end_of_turn>»\n"]),
    Golden("mistral", "single", SINGLE, ["<s>[INST] Hi[/INST]« Hello</s>»"]),
    Golden("mistral", "many", MANY, ["<s>[INST] Hi[/INST]« Hello</s>»[INST] Bye[/INST]« Ciao</s>»"]),
    Golden("mistral", "system", SYSTEM, ["<s>[INST] Be brief.\n\nHi[/INST]« Hello</s>»"]),
    Golden(
        "mistral",
        "tools",
        with_tools("mistral"),
        [
            "<s>[AVAILABLE_TOOLS] [" + TOOL + "][/AVAILABLE_TOOLS][INST] Weather?[/INST]"
            '«[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "call00001"}]</s>»'
            '[TOOL_RESULTS] {"content": 18 degrees, "call_id": "call00001"}[/TOOL_RESULTS]« Warm</s>»'
        ],
        WEATHER,
    ),
    Golden(
        "mistral",
        "tools that move to the last user turn",
        MANY,
        [
            "<s>[AVAILABLE_TOOLS] [" + TOOL + "][/AVAILABLE_TOOLS][INST] Hi[/INST]« Hello</s>»",
            "<s>[INST] Hi[/INST] Hello</s>[AVAILABLE_TOOLS] [" + TOOL + "][/AVAILABLE_TOOLS][INST] Bye[/INST]« Ciao</s>»",
        ],
        WEATHER,
    ),
    Golden("mistral", "empty", EMPTY, ["<s>[INST] Hi[/INST]« </s>»"]),
    # The tokenizer swallows the newlines behind the role tokens.
    Golden("phi", "single", SINGLE, ["<|user|>Hi<|end|><|assistant|>«Hello<|end|>»<|endoftext|>"]),
    Golden("phi", "many", MANY, ["<|user|>Hi<|end|><|assistant|>«Hello<|end|>»<|user|>Bye<|end|><|assistant|>«Ciao<|end|>»<|endoftext|>"]),
    Golden("phi", "system", SYSTEM, ["<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>«Hello<|end|>»<|endoftext|>"]),
    Golden("phi", "empty", EMPTY, ["<|user|>Hi<|end|><|assistant|>«<|end|>»<|endoftext|>"]),
    Golden("glm", "single", SINGLE, ["[gMASK]<sop><|user|>\nHi<|assistant|>«\n<think></think>\nHello<|user|>»"]),
    Golden(
        "glm",
        "many",
        MANY,
        ["[gMASK]<sop><|user|>\nHi<|assistant|>«\n<think></think>\nHello<|user|>»\nBye<|assistant|>«\n<think></think>\nCiao<|user|>»"],
    ),
    Golden("glm", "single, thinking off", SINGLE, ["[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>«\nHello<|user|>»"], NO_THINKING),
    Golden("glm", "system", SYSTEM, ["[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>«\n<think></think>\nHello<|user|>»"]),
    Golden(
        "glm",
        "tools",
        with_tools("glm"),
        [GLM_TOOLS + "«\n<think></think>\n" + GLM_CALL + "»\n<tool_response>\n18 degrees\n</tool_response><|assistant|>«\n<think></think>\nWarm<|user|>»"],
        WEATHER,
    ),
    Golden(
        "glm",
        "tools, each step with a thought",
        with_tools("glm", "hm", "so"),
        [GLM_TOOLS + "«\n<think>hm</think>\n" + GLM_CALL + "»\n<tool_response>\n18 degrees\n</tool_response><|assistant|>«\n<think>so</think>\nWarm<|user|>»"],
        WEATHER,
    ),
    Golden("glm", "thought", THOUGHT, ["[gMASK]<sop><|user|>\nHi<|assistant|>«\n<think>hm</think>\nHello<|user|>»"]),
    Golden(
        "glm",
        "thoughts",
        THOUGHTS,
        [
            "[gMASK]<sop><|user|>\nHi<|assistant|>«\n<think>hm</think>\nHello<|user|>»",
            "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>\nHello<|user|>\nBye<|assistant|>«\n<think>so</think>\nCiao<|user|>»",
        ],
    ),
    Golden("glm", "empty", EMPTY, ["[gMASK]<sop><|user|>\nHi<|assistant|>«\n<think></think><|user|>»"]),
    Golden("smollm2", "single", SINGLE, [SMOL_SYSTEM + CHATML_HI + "«Hello<|im_end|>»\n"]),
    Golden("smollm2", "many", MANY, [SMOL_SYSTEM + CHATML_HI + "«Hello<|im_end|>»\n" + CHATML_BYE + "«Ciao<|im_end|>»\n"]),
    Golden("smollm2", "system", SYSTEM, ["<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML_HI + "«Hello<|im_end|>»\n"]),
    Golden("smollm2", "empty", EMPTY, [SMOL_SYSTEM + CHATML_HI + "«<|im_end|>»\n"]),
]
each_golden = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden.family}-{golden.name}")
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def none_reaches_templates(request: pytest.FixtureRequest) -> None:
    """transformers 5.24 leaves out what is None before it renders; a template that asks whether content is none then takes no tool calls at all."""
    if "deepseek_v3-tools" in request.node.name:
        tokenizer = make_chat("smollm2").tokenizer
        message = {"role": "user", "content": None}
        if tokenizer.apply_chat_template([message], chat_template="{{ messages[0].content is none }}", tokenize=False) != "True":
            with pytest.raises(Unrenderable, match="takes no tool calls"):
                make_chat("deepseek_v3").rows(with_tools("deepseek_v3"), WEATHER)
            pytest.skip("this transformers leaves out what is None before it renders; that it is refused is checked")


@each_golden
def test_rows_are_those_written_by_hand(golden: Golden) -> None:
    chat = make_chat(golden.family)
    assert [marked(chat, row) for row in chat.rows(golden.messages, golden.frame)] == golden.rows


@each_golden
def test_a_row_begins_with_what_a_server_would_give_and_has_one_bos(golden: Golden) -> None:
    chat = make_chat(golden.family)
    rows = chat.rows(golden.messages, golden.frame)
    for row, prompt in zip(
        rows, server_prompts(golden.family, chat, golden.messages, golden.frame), strict=False
    ):  # where all answers share a row, that of the first begins it
        assert row.tokens[: len(prompt)] == prompt and not any(row.supervised[: len(prompt)]) and row.supervised[len(prompt)]
    if (bos := FAMILIES[golden.family].bos) is not None:
        assert chat.tokenizer("Hi")["input_ids"][0] == chat.tokenizer.bos_token_id, "the tokenizer must add one for this test to mean anything"
        assert all(chat.decode(row.tokens[:1]) == bos and row.tokens.count(row.tokens[0]) == 1 for row in rows)


REFUSED = {
    "gemma, system": ("gemma", SYSTEM, PLAIN, "System role not supported"),
    "deepseek_r1, an answer without a thought": ("deepseek_r1", SINGLE, PLAIN, "does not continue its own generation prompt"),
    "deepseek_r1, empty": ("deepseek_r1", EMPTY, PLAIN, "does not continue its own generation prompt"),
    "qwen3, a thought with thinking off": ("qwen3", THOUGHT, NO_THINKING, "does not continue its own generation prompt"),
    "glm, a thought with thinking off": ("glm", THOUGHT, NO_THINKING, "does not continue its own generation prompt"),
    "llama3, a thought whose words the answer repeats": ("llama3", [user("Hi"), answer("hm, Hello", "hm")], PLAIN, "leaves out the thought"),
    **{f"{family}, tools": (family, with_tools(family), WEATHER, "takes no tool calls") for family in ("deepseek_r1", "gemma", "phi", "smollm2")},
    **{
        f"{family}, thought": (family, THOUGHT, PLAIN, "leaves out the thought")
        for family in ("llama3", "qwen25", "deepseek_v3", "kimi_k2", "gemma", "mistral", "phi", "smollm2")
    },
}


@pytest.mark.parametrize(("family", "messages", "frame", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_family_cannot_say_is_refused_by_name(family: str, messages: list[Message], frame: Frame, reason: str) -> None:
    with pytest.raises(Unrenderable, match=reason):
        make_chat(family).rows(messages, frame)


@pytest.mark.parametrize(("family", "stop"), [(family, stop) for family, facts in FAMILIES.items() for stop in facts.stops.split()])
def test_an_answer_that_holds_a_stop_token_is_refused_for_the_target_could_not_go_on(family: str, stop: str) -> None:
    thought = "<think>\nhm\n</think>\n\n" if family == "deepseek_r1" else ""
    with pytest.raises(Unrenderable, match="a stop token stands inside the answer"):
        make_chat(family).rows([user("Hi"), answer(f"{thought}Hel{stop}lo"), *MANY[2:]])


@each_family
@pytest.mark.parametrize("calls", [None, []], ids=["null", "empty list"])
def test_tool_calls_that_are_there_but_none_change_nothing(family: str, calls: Any) -> None:
    """Logs and tables write them in each message; a server leaves them out."""
    plain = INLINE if family == "deepseek_r1" else SINGLE
    chat = make_chat(family)
    assert chat.rows([plain[0], {**plain[1], "tool_calls": calls}]) == chat.rows(plain)


def test_tokens_can_span_the_border_of_the_prompt() -> None:
    chat = make_chat("qwen3", wide=True)
    (row,) = chat.rows([user("Hi"), answer("\n\nHello")], NO_THINKING)
    assert len(chat.ids("\n\n")) == 1 and chat.ids("\n\n" + "Hello") != chat.ids("\n\n") + chat.ids("Hello"), "else the random talks have no such border"
    assert marked(chat, row) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n«Hello<|im_end|>»\n"


@dataclass(frozen=True)
class Talk:
    family: str
    wide: bool
    messages: list[Message]
    frame: Frame


NEXT_ROLES = {None: ("user",), "system": ("user",), "user": ("assistant",), "assistant": ("user",), "call": ("tool",), "tool": ("assistant",)}


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Mostly legal, always with an answer, as Eyas leaves no conversation without one."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    pieces = [*WORDS[:6], "é", "🙂", "0", " ", "  ", "\n", "\n\n", "«", "<think>", "</think>", "<|im", "_end|>"]
    rare = {18: FAMILIES[family].special.split(), 19: FAMILIES[family].stops.split()}
    piece = st.integers(0, 19).flatmap(lambda number: st.sampled_from(rare.get(number, pieces)))
    text = st.lists(piece, max_size=5).map("".join)
    thinks = family in ("qwen3", "deepseek_r1", "gpt_oss", "glm")

    def said() -> Message:
        if family == "deepseek_r1" and draw(st.integers(0, 5)):
            return answer(f"<think>\n{draw(text)}\n</think>\n\n{draw(text)}")
        return answer(draw(text), draw(text) if draw(st.integers(0, 3 if thinks else 15)) == 0 else None)

    messages = [system(draw(text))] if draw(st.integers(0, 4)) == 0 else []
    last = "system" if messages else None
    num_messages = draw(st.integers(1, 6))
    while len(messages) < num_messages:
        role = draw(st.sampled_from(NEXT_ROLES[last]))
        if last != "call" and draw(st.integers(0, 24)) == 0:
            role = draw(st.sampled_from(("system", "user", "assistant", "tool")))
        last = role
        if role == "assistant" and draw(st.integers(0, 4)) == 0 and len(messages) + 1 < num_messages:
            messages.append(call(FAMILIES[family].call_id, draw(text) if thinks and draw(st.booleans()) else None))
            last = "call"
        elif role == "assistant":
            messages.append(said())
        else:
            messages.append(result(FAMILIES[family].call_id, draw(text)) if role == "tool" else {"role": role, "content": draw(text)})
    if all(message["role"] != "assistant" for message in messages):
        messages = [*messages[-5:], said()]
    options = {"enable_thinking": False} if draw(st.integers(0, 3)) == 0 else {}
    return Talk(family, draw(st.booleans()), messages, Frame(WEATHER.tools if draw(st.integers(0, 3)) == 0 else None, options))


def check_rows_are_as_served(talk: Talk) -> None:
    """Either the talk is refused, or each row continues a server's prompt and each supervised stretch ends with its only stop token."""
    chat = make_chat(talk.family, talk.wide)
    try:
        rows = chat.rows(talk.messages, talk.frame)
    except Unrenderable:
        return
    stops = FAMILIES[talk.family].stops.split()
    assert rows
    for row in rows:
        assert len(row.tokens) == len(row.supervised) and any(row.supervised)
        prompts = server_prompts(talk.family, chat, talk.messages, talk.frame)
        assert any(row.tokens[: row.supervised.index(True)] == prompt for prompt in prompts)
        for supervised, ids in stretches(row):
            text = chat.decode(ids)
            assert not supervised or (text.endswith(tuple(stops)) and sum(text.count(stop) for stop in stops) == 1), text


def check_each_answer_stands_in_its_own_stretch(talk: Talk) -> None:
    """As many stretches as answers, and in each what its message says: text, call and thought. Whitespace is the template's to change."""
    chat = make_chat(talk.family, talk.wide)
    try:
        rows = chat.rows(talk.messages, talk.frame)
    except Unrenderable:
        return
    taught = ["".join(chat.decode(ids).split()) for row in rows for supervised, ids in stretches(row) if supervised]
    answers = [message for message in talk.messages if message["role"] == "assistant"]
    assert len(taught) == len(answers) and len(rows) in (1, len(answers))
    for text, message in zip(taught, answers, strict=True):
        said = ["Paris" if "tool_calls" in message else message["content"], message.get("reasoning_content") or ""]
        # Where a thought stands in the text, templates take both apart and write them anew.
        assert all("".join(part.split()) in text for part in said if "think>" not in part), (text, said)


random_talks = given(talk=talks())
some_examples = settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@some_examples
@random_talks
def test_any_talk_is_refused_or_its_rows_are_as_served(talk: Talk) -> None:
    check_rows_are_as_served(talk)


@some_examples
@random_talks
def test_any_talk_is_refused_or_each_answer_stands_in_its_own_stretch(talk: Talk) -> None:
    check_each_answer_stands_in_its_own_stretch(talk)


@pytest.mark.long
@settings(some_examples, max_examples=NUM_EXAMPLES_LONG)
@random_talks
def test_both_hold_for_very_many_talks(talk: Talk) -> None:
    check_rows_are_as_served(talk)
    check_each_answer_stands_in_its_own_stretch(talk)
