"""Facts about a target, read from its folder without loading the model.

In: a folder with config.json, *.safetensors, a tokenizer. Out: a `TargetSpec`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eyas.artifact import hash_file
from eyas.errors import UserError

# The language model's input embedding under the names that model types give it, likelier ones first.
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embeddings.weight", "tok_embeddings.weight")
HEADS = ("lm_head", "output")
# Parts of a tensor's name that mean another model than the target's decoder: towers of other senses, extra prediction layers, one layer's own copies.
FOREIGN = re.compile(r"(^|\.)(vision\w*|visual|vit|image\w*|audio\w*|speech\w*|talker|token2wav|code2wav|mtp\w*|\w*projector|layers|blocks|encoder)\.")
SAMPLE = 1 << 20  # bytes read at both ends of each weight file for the fingerprint: a terabyte model must not cost a full read


@dataclass(frozen=True)
class TargetSpec:
    """`text_config` is the language model's own config, which a multimodal wrapper keeps one level down: under `wrapper`, empty where there is none."""

    path: Path
    text_config: dict[str, Any]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    tied: bool
    stop_ids: tuple[int, ...]  # tokens that end a turn, from generation_config.json, else from config.json
    weight_dtype: str  # of the stored weights, as config.json states it
    architecture: str  # the class that config.json names, which engines look up; a wrapper's where there is one
    quantization: dict[str, Any]  # quantization_config, empty if there is none
    fingerprint: dict[str, str]  # "weights" and "tokenizer": hashes of what the files hold
    wrapper: str = ""

    @property
    def default_layers(self) -> list[int]:
        """The aux layers that EAGLE-3 feeds to the draft (arXiv 2503.01840): early, middle, late; closer to the ends where there are few layers."""
        margin = min(2, max(0, (self.num_layers - 2) // 3))
        return [margin, self.num_layers // 2, self.num_layers - margin - (self.num_layers >= 8)]


def read_spec(path: Path, need_weights: bool = True) -> TargetSpec:
    """Widths and counts that config.json leaves out are read off the weights' shapes and names, without loading them.

    need_weights: false where the config files alone will do. Raises UserError if the folder is no model, has no weights, or leaves out a needed fact.
    """
    if not path.is_dir():
        raise UserError(f"target.path {path} is not a folder. Give the folder of a model: config.json, *.safetensors, a tokenizer.")
    config = _read_config(path / "config.json", required=True)
    wrapper = next((key for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)), "")
    text = config[wrapper] if wrapper else config
    weights = sorted(path.glob("*.safetensors"))
    if not weights and need_weights:
        raise UserError(f"{path} holds no *.safetensors file, so no weights. Download the model completely, or convert it to safetensors.")
    if weights:
        _require_all_files(path)
    shapes = {name: entry["shape"] for file in weights for name, entry in read_header(file).items()}
    text = _shown_by_weights(text, shapes) | text
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size", "model_type") if key not in text]
    if missing:
        raise UserError(f"{path / 'config.json'} does not state {', '.join(missing)}. Eyas needs a decoder-only language model's config.")
    generation = _read_config(path / "generation_config.json", required=False)
    wrong = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if type(text[key]) is not int or text[key] < 1]
    if wrong:
        raise UserError(f"{path / 'config.json'} states {wrong[0]} = {text[wrong[0]]!r}, which must be a whole number above 0. Download or copy it again.")
    stops = (source.get("eos_token_id") for source in (generation, text, config))
    stop = next((found for found in stops if found is not None), None)
    return TargetSpec(
        path=path,
        text_config=text,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_length=text.get("max_position_embeddings", 1 << 30),
        tied=_tied(path, config, text, shapes),
        stop_ids=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
        weight_dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        architecture=str(next(iter(config.get("architectures") or []), text["model_type"])),
        quantization=next((source["quantization_config"] for source in (config, text) if isinstance(source.get("quantization_config"), dict)), {}),
        fingerprint={"weights": _weights_fingerprint(path / "config.json", weights), "tokenizer": _tokenizer_fingerprint(path)},
        wrapper=wrapper,
    )


def embedding_name(names: Collection[str]) -> str | None:
    """The tensor that embeds the target's tokens, through any wrapper's prefix. None if there is none, or several that could be it."""
    for ending in EMBEDDINGS:
        found = [name for name in names if f".{name}".endswith(f".{ending}") and not FOREIGN.search(name)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def decoder_prefix(embedding: str) -> str:
    """`model.language_model.` of the embedding `model.language_model.embed_tokens.weight`: what layers and final norm begin with too."""
    return embedding.removesuffix(next(ending for ending in EMBEDDINGS if embedding.endswith(ending)))


def head_name(names: Collection[str]) -> str | None:
    """The head's tensors without their last part: `lm_head` of `lm_head.weight`, or of `lm_head.weight_packed` where it is quantised."""
    stems = {name.rpartition(".")[0] for name in names if not FOREIGN.search(name)}
    found = [stem for head in HEADS for stem in sorted(stems) if f".{stem}".endswith(f".{head}")]
    return found[0] if found else None


def _shown_by_weights(text: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """The embedding's shape is [V, D]. Configs written by transformers leave out what is their type's default: google/gemma-3-4b-it has no vocab_size,
    llava-hf/llava-1.5-7b-hf no hidden_size."""
    embedding = embedding_name(shapes)
    if embedding is None or len(shapes[embedding]) != 2:
        return {}
    shown = dict(zip(("vocab_size", "hidden_size"), shapes[embedding], strict=True))
    prefix = re.escape(decoder_prefix(embedding))
    layers = {int(match[1]) for name in shapes if (match := re.match(prefix + r"layers\.(\d+)\.", name))}
    if layers and not text.get("num_nextn_predict_layers"):  # which DeepSeek stores as further layers
        shown["num_hidden_layers"] = len(layers)
    return shown


def _tied(path: Path, config: dict[str, Any], text: dict[str, Any], shapes: dict[str, list[int]]) -> bool:
    """Is the head the embedding? transformers' default differs by model type and a config may leave it out, so then the weights tell: no head, tied."""
    stated = [source["tie_word_embeddings"] for source in (config, text) if isinstance(source.get("tie_word_embeddings"), bool)]
    if head_name(shapes) is not None:
        return bool(stated and stated[0])
    if shapes and stated and not any(stated):
        raise UserError(f"{path}: config.json says tie_word_embeddings = false, but no *.safetensors file holds lm_head. Download the model completely.")
    return bool(shapes) or any(stated)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", ...} of a safetensors file. Raises UserError if it is cut short or no safetensors file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError):
        raise UserError(f"{path} is not a whole safetensors file. Download or copy it again.") from None
    if path.stat().st_size < whole:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes of {whole:,}: it is cut short. Download or copy it again.")
    return header


def _read_config(path: Path, required: bool) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise UserError(f"{path} does not exist, so {path.parent} is no model folder. Give the folder that config.json lies in.") from None
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). Download or copy it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object. Download or copy it again.")
    return config


def _require_all_files(path: Path) -> None:
    """Raises UserError if the index of the weights names a file that is not there."""
    index = _read_config(path / "model.safetensors.index.json", required=False)
    named = set(index["weight_map"].values()) if isinstance(index.get("weight_map"), dict) else set()
    missing = sorted(str(name) for name in named if not (path / str(name)).is_file())
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of the {len(named)} files that model.safetensors.index.json names are not there ({missing[0]}). Download the model "
            "completely."
        )


def _weights_fingerprint(config: Path, weights: list[Path]) -> str:
    digest = xxhash.xxh3_128(config.read_bytes())
    for path in weights:
        read_header(path)
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _tokenizer_fingerprint(path: Path) -> str:
    digest = xxhash.xxh3_128()
    for name in (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        if (path / name).is_file():
            digest.update(f"{name} {hash_file(path / name)} ".encode())
    return digest.hexdigest()
