"""A target cut to its first layers, with made-up weights: the same tokenizer, template, quantisation and kernels, minutes instead of hours.

In: a target's folder, of whose weight files only the headers are read: names, types, shapes. Out: a folder that engines load like any other. Without weight
files names and shapes are made from config.json, where transformers knows the architecture.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eyas.artifact import tensors_head
from eyas.errors import UserError
from eyas.foresight.size import SAME_LAYERS, is_ignored, stored_weights
from eyas.target.spec import TargetSpec, decoder_prefix, embedding_name, read_header

FEWEST, MOST = 4, 16  # layers; three of them feed the draft, and all kinds of layer that the target has should be among them
FILE_BYTES = 4 << 30  # of one file of made-up weights
SMALL = 256 << 20  # bytes; larger files beside the weights are no tokenizer and no code
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".onnx", ".h5", ".msgpack")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Shapes = dict[str, tuple[torch.dtype, list[int]]]  # of tensors by name


def cut_target(spec: TargetSpec, folder: Path, seed: int = 0) -> int:
    """Writes the cut target into `folder`, which must be new; returns its layers. Raises UserError if its tensors cannot be known."""
    folder.mkdir(parents=True)
    shapes = _shapes_of_files(spec.path)
    depth = max(_depth(shapes, spec), _depth_of_config(spec))
    config = json.loads((spec.path / "config.json").read_bytes())
    if shapes:
        layer = _layers(shapes)
        shapes = {name: kind for name, kind in shapes.items() if layer(name) < depth}
        _shorten(config, spec.num_layers, depth)
    else:
        # The wrapper's names are not known, so the language model alone.
        kind = SAME_LAYERS.get(spec.text_config["model_type"], spec.text_config["model_type"])
        config = {**spec.text_config, "model_type": kind, "architectures": spec.text_config.get("architectures") or [spec.architecture]}
        _shorten(config, spec.num_layers, depth)
        shapes = _shapes_of_config(spec, depth)
    for path in spec.path.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != "config.json" and path.stat().st_size <= SMALL:
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write(shapes, folder, seed)
    return depth


def _shapes_of_files(path: Path) -> Shapes:
    found: Shapes = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in read_header(file).items():
            if entry["dtype"] not in DTYPES:
                raise UserError(f"{file}: {name} has the type {entry['dtype']}, for which Eyas cannot make up weights. Please report it.")
            found[name] = (DTYPES[entry["dtype"]], entry["shape"])
    return found


def _layers(shapes: Shapes) -> Callable[[str], int]:
    """Tells of a tensor's name which decoder layer it belongs to; -1 of everything else."""
    embedding = embedding_name(shapes)
    pattern = re.compile(re.escape(decoder_prefix(embedding) if embedding else "") + r"layers\.(\d+)\.")

    def layer(name: str) -> int:
        found = pattern.match(name)
        return int(found[1]) if found else -1

    return layer


def _depth(shapes: Shapes, spec: TargetSpec) -> int:
    """The fewest first layers among which is one of each kind, told by the names and shapes of its tensors; FEWEST without any."""
    kinds: dict[int, set[tuple[str, str]]] = {}
    layer_of = _layers(shapes)
    for name, (dtype, shape) in shapes.items():
        layer = layer_of(name)
        if 0 <= layer < spec.num_layers:
            kinds.setdefault(layer, set()).add((re.sub(r"layers\.\d+\.", "", name, count=1), f"{dtype} {shape}"))
    wanted = {frozenset(kind) for kind in kinds.values()}
    for depth in range(spec.num_layers):
        if {frozenset(kinds[layer]) for layer in range(depth) if layer in kinds} == wanted:
            return min(spec.num_layers, max(FEWEST, min(depth, MOST)))
    return min(spec.num_layers, MOST)


def _depth_of_config(spec: TargetSpec) -> int:
    """The same by what the config says: layers of one shape may attend in two ways."""
    text = spec.text_config
    dense = int(text.get("first_k_dense_replace") or 0)
    kinds = text.get("layer_types")
    varied = next((n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds)), 1) if isinstance(kinds, list) else 1
    return min(spec.num_layers, max(FEWEST, min(max(dense + 1, varied), MOST)))


def _shorten(config: dict[str, Any], layers: int, depth: int) -> None:
    """In every table of the config that counts the decoder's layers: their number, and lists with an entry for each."""
    for value in config.values():
        if isinstance(value, dict):
            _shorten(value, layers, depth)
    if config.get("num_hidden_layers") == layers:
        config["num_hidden_layers"] = depth
        for key, value in config.items():
            if isinstance(value, list) and len(value) == layers:
                config[key] = value[:depth]
        if config.get("num_nextn_predict_layers"):  # layers for drafting, behind those of the model
            config["num_nextn_predict_layers"] = 0


def _shapes_of_config(spec: TargetSpec, depth: int) -> Shapes:
    """As checkpoints have them: an expert's matrices one by one, what is quantised to INT4 packed."""
    text = dict(spec.text_config)
    kind = SAME_LAYERS.get(text["model_type"], text["model_type"])
    method = spec.quantization.get("quant_method")
    packed = method == "compressed-tensors" and stored_weights(spec.quantization).get("num_bits") == 4
    if kind not in CONFIG_MAPPING or (method and not packed):
        raise UserError(
            f"{spec.path} holds no weight files, and how its tensors are named cannot be told from config.json alone ({text['model_type']}, quantisation "
            f"{method or 'none'}). Copy its *.safetensors there; only their headers are read."
        )
    for key in ("model_type", "auto_map", "quantization_config", "dtype", "torch_dtype"):
        text.pop(key, None)
    _shorten(text, spec.num_layers, depth)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**text, "tie_word_embeddings": spec.tied}))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}"}
    plain: dict[str, list[int]] = {}
    for name, parameter in [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict())]:
        stem, _, last = name.rpartition(".")
        shape = list(parameter.shape)
        if last in ("gate_up_proj", "down_proj") and len(shape) == 3:
            for expert in range(shape[0]):
                halves = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
                for half in halves:
                    module = f"{stem}.{expert}.{half}"
                    linear.add(module)
                    plain[f"{module}.weight"] = [shape[1] // len(halves), shape[2]]
        else:
            plain[name] = shape
    found: Shapes = {}
    for name, shape in plain.items():
        module = name.removesuffix(".weight")
        if packed and module in linear and not is_ignored(spec.quantization, module):
            group = stored_weights(spec.quantization)["group_size"]
            found[f"{module}.weight_packed"] = (torch.int32, [shape[0], shape[1] // 8])
            found[f"{module}.weight_scale"] = (torch.bfloat16, [shape[0], shape[1] // group])
            found[f"{module}.weight_shape"] = (torch.int32, [2])
        else:
            found[name] = (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16, shape)
    return found


def _write(shapes: Shapes, folder: Path, seed: int) -> None:
    pattern = lru_cache(maxsize=None)(partial(_pattern, torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))))
    where: dict[str, str] = {}
    total = 0
    for number, part in enumerate(_in_parts(shapes), 1):
        file = f"model-{number:05d}.safetensors"
        total += _write_file(folder / file, part, lambda name: made_up(name, shapes, pattern))
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))


def _write_file(path: Path, shapes: Shapes, values: Callable[[str], torch.Tensor]) -> int:
    """A safetensors file whose tensors are filled with their values over and over; returns their bytes. (By the library each would be made first, which
    takes longer than writing it.)"""
    names = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)  # so that each begins at a multiple of its own width
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = shapes[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    with open(path, "wb") as file:
        file.write(tensors_head(header))
        for name in names:
            begin, left = header[name]["data_offsets"]
            left -= begin
            data = values(name).view(torch.uint8).numpy().data
            while left:
                left -= file.write(data[:left])
    return end


def _in_parts(shapes: Shapes) -> Iterator[Shapes]:
    part: Shapes = {}
    size = 0
    for name, (dtype, shape) in shapes.items():
        part[name] = (dtype, shape)
        size += dtype.itemsize * math.prod(shape)
        if size >= FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def made_up(name: str, shapes: Shapes, pattern: Callable[[str, torch.dtype], torch.Tensor]) -> torch.Tensor:
    """Values with which a tensor is filled over and over, so that every layer gives numbers of an ordinary size: norms near one, matrices as if freshly
    initialised, codes at random, scales that bring them back to that size. pattern: kind and dtype -> such values, [n]."""
    (dtype, shape), last = shapes[name], name.rpartition(".")[2]
    if last == "weight_shape":  # of a packed matrix: what it is when unpacked, 8 codes of 4 bits an entry
        rows, columns = shapes[name.removesuffix("weight_shape") + "weight_packed"][1]
        return torch.tensor([rows, columns * 8], dtype=dtype)
    if last == "g_idx":  # GPTQ: the group of each input
        count = math.prod(shape)
        groups = next((kind[1][0] for other, kind in shapes.items() if other == name.removesuffix("g_idx") + "scales"), 1)
        return (torch.arange(count) * groups // max(1, count)).to(dtype)
    if "scale" in last:
        return pattern("scales of INT4" if last in ("weight_scale", "scales") else "scales", dtype)
    if dtype == torch.bool or not dtype.is_floating_point:
        return pattern("codes", dtype)
    return pattern("matrix" if len(shape) != 1 else "norm" if "norm" in name.lower() else "vector", dtype)


def _pattern(noise: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind.startswith("scales"):
        if not dtype.is_floating_point:  # mxfp4: powers of two, 127 is one
            return torch.full(noise.shape, 119, dtype=dtype)
        # Of INT4 codes (-8 to 7, 4.6 on average) and of float8 codes as made below (1 on average), a matrix of size 0.02.
        return torch.full(noise.shape, 0.004 if kind == "scales of INT4" else 0.02, dtype=torch.float32).to(dtype)
    if dtype == torch.bool:
        return noise > 0
    if kind == "codes":
        codes = (noise * 1e6).to(torch.int64) * 0x9E3779B1
        limits = torch.iinfo(torch.int32 if dtype == torch.int64 else dtype)
        return (codes % (limits.max - limits.min + 1) + limits.min).to(dtype)
    if kind == "norm":
        return (1 + 0.05 * noise).to(dtype)
    return (noise if dtype.itemsize == 1 and kind == "matrix" else 0.02 * noise).to(dtype)
